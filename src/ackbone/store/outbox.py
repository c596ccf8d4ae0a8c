"""The outbox: messages that were committed with what made them, for a broker elsewhere.

A row is published and then deleted: a crash between the two publishes it again under the same id,
which the store recognizes. While the broker is away rows wait; one that it refuses waits alone, and
one that can never be published becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ackbone.core.broker import Broker, Outgoing
from ackbone.core.codec import CODECS, stored_form
from ackbone.core.errors import AckboneError, InvalidMessage, StoreCorrupt
from ackbone.core.store import Worker
from ackbone.store.letters import Letter

log = logging.getLogger("ackbone.outbox")

BATCH = 500
REFUSED_WAIT_S = 5.0


class Row(msgspec.Struct, frozen=True):
    """One row that is due."""

    id: bytes
    tenant_id: str
    queue: str
    message_id: str
    headers: str
    body: bytes
    crc: int
    priority: int
    key: str | None
    ttl_us: int | None

    def outgoing(self) -> Outgoing:
        """Raises StoreCorrupt if the row is not what was written."""
        if zlib.crc32(self.body) != self.crc:
            raise StoreCorrupt(f"message {self.message_id}: its body does not match its checksum")
        return Outgoing(
            id=self.message_id,
            body=self.body,
            headers=msgspec.json.decode(self.headers, type=dict[str, str]),
            priority=self.priority,
            ttl_s=None if self.ttl_us is None else self.ttl_us / 1e6,
            key=self.key,
        )


class OutboxRows(Protocol):
    """The table."""

    async def due(self, limit: int) -> Sequence[Row]:
        """The oldest rows that may go now."""
        ...

    async def settle(
        self,
        *,
        gone: Sequence[Row],
        waiting: Sequence[Row],
        letters: Sequence[Letter],
        worker: Worker,
    ) -> None:
        """In one transaction: these are deleted, those wait `REFUSED_WAIT_S`, letters are kept."""
        ...

    def subscribe(self) -> asyncio.Event: ...

    def unsubscribe(self, event: asyncio.Event) -> None: ...


class Outbox:
    """One step publishes all that is due. Run it under the role `outbox`."""

    def __init__(self, rows: OutboxRows, broker: Broker, *, codec_of: Callable[[str], str]) -> None:
        self._rows = rows
        self._broker = broker
        self._codec_of = codec_of

    async def due(self) -> bool:
        return bool(await self._rows.due(1))

    async def step(self, worker: Worker) -> int:
        """Returns how many messages were published."""
        published = 0
        while rows := await self._rows.due(min(BATCH, self._broker.capabilities.max_batch)):
            queues: dict[str, list[Row]] = {}
            for row in rows:
                queues.setdefault(row.queue, []).append(row)
            for queue, batch in queues.items():
                published += await self._publish(queue, batch, worker)
        return published

    def subscribe(self) -> asyncio.Event:
        return self._rows.subscribe()

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._rows.unsubscribe(event)

    async def _publish(self, queue: str, batch: Sequence[Row], worker: Worker) -> int:
        good: list[Row] = []
        outgoing: list[Outgoing] = []
        dead: list[tuple[Row, AckboneError]] = []
        waiting: list[Row] = []
        for row in batch:
            try:
                outgoing.append(row.outgoing())
                good.append(row)
            except (StoreCorrupt, msgspec.MsgspecError) as error:
                dead.append((row, StoreCorrupt(str(error))))
        done: list[Row] = []
        results = await self._broker.publish(queue, outgoing) if outgoing else ()
        for row, result in zip(good, results, strict=True):
            if result.error is None:
                done.append(row)
            elif isinstance(result.error, InvalidMessage):
                dead.append((row, result.error))
            else:
                log.warning("message %s for %s waits: %s", row.message_id, queue, result.error)
                waiting.append(row)
        await self._rows.settle(
            gone=[*done, *(row for row, _ in dead)],
            waiting=waiting,
            letters=[self._letter(row, error) for row, error in dead],
            worker=worker,
        )
        return len(done)

    def _letter(self, row: Row, error: AckboneError) -> Letter:
        codec = CODECS[self._codec_of(row.queue)]
        try:
            headers = msgspec.json.decode(row.headers, type=dict[str, str])
        except msgspec.MsgspecError:
            headers = {}
        corrupt = isinstance(error, StoreCorrupt)
        return Letter(
            tenant_id=row.tenant_id,
            subscription=row.queue,
            message_id=row.message_id,
            queue=row.queue,
            event_name=None,
            reason="body_corrupt" if corrupt else "unpublishable",
            error=str(error),
            body=row.body,
            body_info=stored_form(codec, headers),
        )
