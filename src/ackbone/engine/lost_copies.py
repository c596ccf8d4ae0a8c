"""Find messages whose copy the broker has lost, and end them as dead letters."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ackbone.core.broker import Shows, Subscription
from ackbone.core.outcome import Identity
from ackbone.core.store import Copies, Worker

from .decoder import decoder

log = logging.getLogger("ackbone.engine")

AT_ONCE = 500
"""The most messages that one step looks for."""
MOST = 20_000
"""The most copies that one step reads. A longer backlog has to shrink first."""


class LostCopies:
    """Ends messages that wait for a copy which the broker does not have."""

    def __init__(
        self, store: Copies, broker: Shows, subscriptions: Sequence[Subscription], *, after_s: float
    ) -> None:
        """`after_s`: how long a message must have waited before its copy is looked for."""
        self._store = store
        self._broker = broker
        self._subscriptions = subscriptions
        self._after_s = after_s

    async def due(self) -> bool:
        """Return True if a message has waited for its copy for too long."""
        for sub in self._subscriptions:
            if await self._store.waiting(sub.name, for_s=self._after_s, limit=1):
                return True
        return False

    async def step(self, worker: Worker) -> None:
        for sub in self._subscriptions:
            await self._end_lost(sub, worker)

    async def _end_lost(self, sub: Subscription, worker: Worker) -> None:
        waiting = await self._store.waiting(sub.name, for_s=self._after_s, limit=AT_ONCE)
        lost = await self._without_copy(sub, {(tenant, name) for tenant, name in waiting})
        if not lost:
            return
        ended = await self._store.end(sub.name, sorted(lost), for_s=self._after_s, worker=worker)
        if not ended:  # they came back meanwhile
            return
        log.error(
            "%s: the broker lost its copies of %d messages, %s among them, while no worker had"
            " finished them. They are dead letters now: ackbone dlq list --reason copy_lost",
            sub.queue,
            ended,
            min(lost)[1],
        )

    async def _without_copy(self, sub: Subscription, wanted: set[Identity]) -> set[Identity]:
        """Return the messages of `wanted` that the broker does not hold. Empty if the broker holds
        too many to look at."""
        decode = decoder(sub)
        seen = 0
        if not wanted:
            return wanted
        async for batch in self._broker.copies(sub):
            for delivery in batch:
                message = decode(delivery).message
                if message is not None:
                    wanted.discard((message.tenant_id, message.id))
            seen += len(batch)
            if seen > MOST:
                log.warning(
                    "%s: %d messages have waited for %.0f s for the broker to bring them back; the"
                    " queue is too long to look for their copies",
                    sub.queue,
                    len(wanted),
                    self._after_s,
                )
                return set()
            if not wanted:
                break
        return wanted
