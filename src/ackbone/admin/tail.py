"""Follow the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
from collections.abc import AsyncGenerator

import msgspec

from ackbone.core.records import LedgerEvent, Records

NET_S = 0.5
"""Seconds between two reads without a wake-up; not every commit sends one, and one can get lost."""
PAGE = 500


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects events; without any field, all."""

    queues: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    """Shell patterns: `task.*`, `*failed`."""
    tenant_id: str | None = None
    task_id: str | None = None
    """The beginning of a message id."""

    def matches(self, event: LedgerEvent) -> bool:
        return (
            (not self.queues or event.subscription in self.queues)
            and (not self.types or any(fnmatch.fnmatchcase(event.type, t) for t in self.types))
            and self.tenant_id in (None, event.tenant_id)
            and (self.task_id is None or event.task_id.startswith(self.task_id))
        )


async def follow(
    records: Records,
    where: EventFilter,
    *,
    position: int,
    since_us: int | None = None,
    forever: bool = True,
) -> AsyncGenerator[LedgerEvent, None]:
    """Yield the events after `position`, then each new one when it is committed."""
    woken = records.subscribe()
    try:
        while True:
            woken.clear()
            page = await records.events_after(position, limit=PAGE, since_us=since_us)
            for event in page:
                position = event.position
                if where.matches(event):
                    yield event
            if len(page) == PAGE:
                continue
            if not forever:
                return
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it drops a cancellation that meets the event.
                async with asyncio.timeout(NET_S):
                    await woken.wait()
    finally:
        records.unsubscribe(woken)
