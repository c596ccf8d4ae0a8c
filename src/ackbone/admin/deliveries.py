"""Replies on their way out: list, read, send again, edit, discard; channels: pause, resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import msgspec

from ackbone.core.delivery import Status
from ackbone.core.delivery_desk import (
    DeliveryActs,
    DeliveryFilter,
    DeliveryRecord,
    DeliveryRecords,
)
from ackbone.core.errors import AckboneError, Conflict, InvalidMessage

from .naming import SHORTEST, check_typed, the_one

BATCH = 100
SHORT = 8
"""Characters of an id that people are shown."""
WAITING = (Status.PENDING, Status.QUEUED, Status.SENDING)
UNDELIVERED = (Status.FAILED, Status.UNKNOWN)
RETRIABLE = frozenset({Status.FAILED, Status.UNKNOWN, Status.PENDING})
DISCARDABLE = RETRIABLE | {Status.QUEUED}


class Treated(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one reply that an operator named."""

    id: str
    error: AckboneError | None = None


class Deliveries:
    """The use cases. `acts` is needed for acting only."""

    def __init__(self, records: DeliveryRecords, acts: DeliveryActs | None = None) -> None:
        self._records = records
        self._acts = acts

    async def find(self, name: str, *, tenant_id: str | None = None) -> DeliveryRecord:
        """By id, or the beginning of one. Raises NotFound, or Ambiguous with the matches."""
        name = check_typed(name)
        found = await self._records.deliveries_named(name, tenant_id=tenant_id)
        if len(name) < SHORTEST and not any(each.id == name for each in found):
            raise InvalidMessage(f"{name!r} is too short: write at least {SHORTEST} characters")
        return the_one(
            found,
            name=name,
            what="reply",
            several="replies",
            describe=lambda each: (
                f"{each.id}  {each.channel}:{each.recipient}  {each.tenant_id}  {each.status}"
            ),
            hint="; 'ackbone deliveries list' shows what there is",
        )

    async def listed(
        self, where: DeliveryFilter, *, statuses: Sequence[Status] = (), limit: int
    ) -> list[DeliveryRecord]:
        """Newest first; of several `statuses`, those of the first one first."""
        if not statuses:
            return list(await self._records.deliveries(where, limit=limit))
        found: list[DeliveryRecord] = []
        for status in statuses:
            one = msgspec.structs.replace(where, status=status)
            found += await self._records.deliveries(one, limit=limit)
        return found[:limit]

    async def chosen(self, where: DeliveryFilter, *, limit: int | None = None) -> list[str]:
        """Ids, the oldest first. From here on it is settled which replies are meant."""
        return list(await self._records.delivery_ids(where, limit=limit))

    async def read(self, ids: Sequence[str]) -> AsyncIterator[DeliveryRecord]:
        """As they are now; what is gone meanwhile is left out."""
        for delivery_id in ids:
            for record in await self._records.deliveries_named(delivery_id, tenant_id=None):
                if record.id == delivery_id:
                    yield record

    def retry(
        self, ids: Sequence[str], *, stop: asyncio.Event | None = None
    ) -> AsyncIterator[Treated]:
        """They are due now, with all their attempts. What was yielded is done, the rest is as it
        was when `stop` is set."""
        return _in_batches(ids, self._acting.retry_deliveries, stop)

    async def edit(self, record: DeliveryRecord, content: str) -> None:
        """Another text; what waits is sent so, what failed stays failed. Raises Conflict."""
        if not content.strip():
            raise InvalidMessage("a reply without text is not sent; discard it instead")
        await self._acting.edit_delivery(record.id, content=content)

    def discard(
        self, ids: Sequence[str], *, reason: str, stop: asyncio.Event | None = None
    ) -> AsyncIterator[Treated]:
        """They are given up, and kept like those that were sent. `stop` is as for `retry`."""
        return _in_batches(ids, partial(self._acting.discard_deliveries, reason=reason), stop)

    async def pause(self, channel: str) -> bool:
        """Nothing more is taken for this channel. False: it was paused before."""
        return await self._acting.pause_channel(channel)

    async def resume(self, channel: str) -> bool:
        """False: it was not paused."""
        return await self._acting.unpause_channel(channel)

    @property
    def _acting(self) -> DeliveryActs:
        if self._acts is None:
            raise RuntimeError("these replies can only be looked at")
        return self._acts


async def _in_batches(
    ids: Sequence[str],
    act: Callable[[Sequence[str]], Awaitable[Sequence[AckboneError | None]]],
    stop: asyncio.Event | None,
) -> AsyncIterator[Treated]:
    """No more at a time than the senders can wait for."""
    for at in range(0, len(ids), BATCH):
        if stop is not None and stop.is_set():
            return
        batch = ids[at : at + BATCH]
        for delivery_id, error in zip(batch, await act(batch), strict=True):
            yield Treated(id=delivery_id, error=error)


def not_retriable(record: DeliveryRecord) -> Conflict | None:
    """Why it would not be sent again, as far as can be told without trying."""
    if record.status in RETRIABLE:
        return None
    return Conflict(f"reply {record.id} cannot be sent again: it is {record.status}")


def not_discardable(record: DeliveryRecord) -> Conflict | None:
    """Why it would not be given up, as far as can be told without trying."""
    if record.status in DISCARDABLE:
        return None
    return Conflict(f"reply {record.id} cannot be discarded: it is {record.status}")


def short_names(ids: Sequence[str]) -> list[str]:
    """The beginnings of ids, as long as it takes to tell these apart."""
    unique = set(ids)
    longest = max(map(len, unique), default=0)
    for length in range(SHORT, longest):
        if len({each[:length] for each in unique}) == len(unique):
            return [each[:length] for each in ids]
    return list(ids)
