"""Replies: list, read, retry, edit, discard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from functools import partial

import msgspec

from ackbone.core.errors import AckboneError, Conflict, InvalidMessage
from ackbone.core.outbound.delivery import Status
from ackbone.core.outbound.delivery_records import (
    DeliveryActs,
    DeliveryFilter,
    DeliveryRecord,
    DeliveryRecords,
)

from .naming import Desk, check_length, check_typed, the_one

BATCH = 100
SHORT = 8
"""The number of characters of an id in lists."""
WAITING = (Status.PENDING, Status.QUEUED, Status.SENDING)
UNDELIVERED = (Status.FAILED, Status.UNKNOWN)
RETRIABLE = frozenset({Status.FAILED, Status.UNKNOWN, Status.PENDING})
DISCARDABLE = RETRIABLE | {Status.QUEUED}


class Treated(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an action on one reply."""

    id: str
    error: AckboneError | None = None


class Deliveries(Desk[DeliveryRecords, DeliveryActs]):
    """Actions on replies."""

    async def find(self, name: str, *, tenant_id: str | None = None) -> DeliveryRecord:
        """Find by id or its beginning. Raises NotFound, or Ambiguous with the matches."""
        name = check_typed(name)
        found = await self._records.deliveries_named(name, tenant_id=tenant_id)
        if not any(each.id == name for each in found):
            check_length(name)
        return the_one(
            found,
            name=name,
            what="reply",
            several="replies",
            describe=lambda each: (
                f"{each.id}  {each.channel}:{each.recipient}  {each.tenant_id}  {each.status}"
            ),
            hint="; list them with 'ackbone deliveries list'",
        )

    async def listed(self, statuses: Sequence[Status], *, limit: int) -> list[DeliveryRecord]:
        """Return replies in the order of the statuses, and the newest of each status first."""
        found: list[DeliveryRecord] = []
        for status in statuses:
            found += await self._records.deliveries(DeliveryFilter(status=status), limit=limit)
        return found[:limit]

    async def read(self, ids: Sequence[str]) -> AsyncIterator[DeliveryRecord]:
        """Yield the replies with these ids as they are now, without those that no longer exist."""
        for delivery_id in ids:
            for record in await self._records.deliveries_named(delivery_id, tenant_id=None):
                if record.id == delivery_id:
                    yield record

    def retry(
        self, ids: Sequence[str], *, stop: asyncio.Event | None = None
    ) -> AsyncIterator[Treated]:
        """Make replies due now, with a full set of attempts.

        Once `stop` is set, the replies that were not yielded stay unchanged.
        """
        return _in_batches(ids, self._acting.retry_deliveries, stop)

    async def edit(self, record: DeliveryRecord, content: str) -> None:
        """Change the text of a reply. A failed reply stays failed. Raises Conflict."""
        if not content.strip():
            raise InvalidMessage("a reply needs text; discard it instead")
        await self._acting.edit_delivery(record.id, content=content)

    def discard(
        self, ids: Sequence[str], *, reason: str, stop: asyncio.Event | None = None
    ) -> AsyncIterator[Treated]:
        """Give up replies; they are kept like sent ones. `stop` works as for `retry`."""
        return _in_batches(ids, partial(self._acting.discard_deliveries, reason=reason), stop)


async def _in_batches(
    ids: Sequence[str],
    act: Callable[[Sequence[str]], Awaitable[Sequence[AckboneError | None]]],
    stop: asyncio.Event | None,
) -> AsyncIterator[Treated]:
    """Act in batches, so that no transaction holds up the workers for long."""
    for at in range(0, len(ids), BATCH):
        if stop is not None and stop.is_set():
            return
        batch = ids[at : at + BATCH]
        for delivery_id, error in zip(batch, await act(batch), strict=True):
            yield Treated(id=delivery_id, error=error)


def refusal(record: DeliveryRecord, statuses: Container[str], done: str) -> Conflict | None:
    """Return why a reply cannot be `done`: it has none of the statuses. None if it has one."""
    if record.status in statuses:
        return None
    return Conflict(f"reply {record.id} cannot be {done}: it is {record.status}")


def short_names(ids: Sequence[str]) -> list[str]:
    """Return the beginnings of ids, long enough to be unique."""
    unique = set(ids)
    longest = max(map(len, unique), default=0)
    for length in range(SHORT, longest):
        if len({each[:length] for each in unique}) == len(unique):
            return [each[:length] for each in ids]
    return list(ids)
