"""What `ackbone chat` puts between a reply and the screen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from ackbone.core.delivery import Deliveries, Fits, Limits, New, Outbound, Settled, Taken
from ackbone.core.delivery_desk import DeliveryFilter, DeliveryRecord, DeliveryRecords
from ackbone.core.errors import AckboneError, RateLimited, TemporaryError
from ackbone.core.store import Worker
from ackbone.core.text import lines, one_line
from ackbone.delivery.repeats import marked
from ackbone.delivery.terminal import CHANNEL, GONE_S

from .screen import Screen

NAME = "Agent > "
LOOK = 100
"""So many replies at most are new at one look."""


class ChatChannel:
    """Prints replies; the next `failures` of them it only pretends to have tried."""

    name = CHANNEL

    def __init__(self, screen: Screen) -> None:
        self.failures = 0
        self._screen = screen

    async def send(self, reply: Outbound) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise TemporaryError("simulated failure")
        text = marked(reply).content
        record = {"reply": {"id": reply.id, "to": one_line(reply.recipient), "content": text}}
        shown = self._screen.show(f"{NAME}{lines(text, ' ' * len(NAME))}", record)
        try:
            await asyncio.wrap_future(shown)
        except (OSError, ValueError) as error:
            raise RateLimited(f"it cannot be printed: {error}", retry_after_s=GONE_S) from error

    async def close(self) -> None:
        pass


class AnnouncedDeliveries:
    """A queue of replies that tells of each new one, before any attempt at it begins."""

    def __init__(
        self,
        inner: Deliveries,
        records: DeliveryRecords,
        announce: Callable[[DeliveryRecord], None],
    ) -> None:
        self._inner = inner
        self._records = records
        self._announce = announce
        self._known: set[str] = set()

    async def begin(self) -> None:
        """What is there now is not new."""
        self._known.update(each.id for each in await self._newest())

    async def take(self, channels: Mapping[str, Limits], *, limit: int, worker: Worker) -> Taken:
        taken = await self._inner.take(channels, limit=limit, worker=worker)
        await self._tell()
        return taken

    async def follow(
        self, head: Outbound, fits: Fits, *, limit: int, worker: Worker
    ) -> Sequence[Outbound]:
        found = await self._inner.follow(head, fits, limit=limit, worker=worker)
        if found:
            await self._tell()
        return found

    async def _tell(self) -> None:
        # What was taken must be sent, whatever becomes of our look.
        with contextlib.suppress(AckboneError):
            for record in reversed(await self._newest()):
                if record.id not in self._known:
                    self._known.add(record.id)
                    self._announce(record)

    async def _newest(self) -> Sequence[DeliveryRecord]:
        return await self._records.deliveries(DeliveryFilter(), limit=LOOK)

    # -- as it is ---------------------------------------------------------------------------------

    async def put(self, replies: Sequence[New], *, worker: Worker | None = None) -> None:
        await self._inner.put(replies, worker=worker)

    async def due_in_s(self, channels: Mapping[str, Limits]) -> float | None:
        return await self._inner.due_in_s(channels)

    async def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], *, worker: Worker
    ) -> None:
        await self._inner.settle(channels, batch, worker=worker)

    async def recover(self, *, worker: Worker) -> int:
        return await self._inner.recover(worker=worker)

    def subscribe(self) -> asyncio.Event:
        return self._inner.subscribe()

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._inner.unsubscribe(event)
