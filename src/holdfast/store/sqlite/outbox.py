"""The outbox: follow-up messages that were committed with their runs, for a broker elsewhere.

A row is published and then deleted: a crash between the two publishes it again under the same id,
which the store recognizes. While the broker is away rows wait; one that it refuses waits alone, and
one that can never be published becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import zlib
from collections.abc import Callable, Sequence

import msgspec

from holdfast.core.broker import Broker, Outgoing
from holdfast.core.codec import CODECS, stored_form
from holdfast.core.errors import HoldfastError, InvalidMessage, StoreCorrupt
from holdfast.core.store import Worker
from holdfast.sqlite.wake import OUTGOING
from holdfast.store.letter import Letter

from .letters import bury
from .store import SqliteStore

log = logging.getLogger("holdfast.outbox")

BATCH = 500
REFUSED_WAIT_S = 5.0
_COLUMNS = (
    "id, tenant_id, queue_name, message_id, headers, body, body_crc, priority, ordering_key, ttl_us"
)


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


class Outbox:
    """One step publishes all that is due. Run it under the role `outbox`."""

    def __init__(
        self, store: SqliteStore, broker: Broker, *, codec_of: Callable[[str], str]
    ) -> None:
        self._store = store
        self._broker = broker
        self._codec_of = codec_of

    async def due(self) -> bool:
        return bool(await self._read(1))

    async def step(self, worker: Worker) -> int:
        """Returns how many messages were published."""
        published = 0
        while rows := await self._read(min(BATCH, self._broker.capabilities.max_batch)):
            queues: dict[str, list[Row]] = {}
            for row in rows:
                queues.setdefault(row.queue, []).append(row)
            for queue, batch in queues.items():
                published += await self._publish(queue, batch, worker)
        return published

    def subscribe(self) -> asyncio.Event:
        return self._store.file.subscribe(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)

    async def _read(self, limit: int) -> list[Row]:
        now = self._store.clock.now_us()
        return await self._store.file.read(
            lambda conn: [
                Row(*values)
                for values in conn.execute(
                    f"SELECT {_COLUMNS} FROM outbox WHERE due_at <= ? ORDER BY due_at, id LIMIT ?",
                    (now, limit),
                )
            ]
        )

    async def _publish(self, queue: str, batch: Sequence[Row], worker: Worker) -> int:
        good: list[Row] = []
        outgoing: list[Outgoing] = []
        dead: list[tuple[Row, HoldfastError]] = []
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
        await self._store.file.write(
            lambda conn: self._settle(conn, done, waiting, dead, worker), durable=bool(dead)
        )
        return len(done)

    def _settle(
        self,
        conn: sqlite3.Connection,
        done: Sequence[Row],
        waiting: Sequence[Row],
        dead: Sequence[tuple[Row, HoldfastError]],
        worker: Worker,
    ) -> None:
        now = self._store.clock.now_us()
        gone = [(row.id,) for row in (*done, *(row for row, _ in dead))]
        conn.executemany("DELETE FROM outbox WHERE id = ?", gone)
        again = now + int(REFUSED_WAIT_S * 1e6)
        conn.executemany(
            "UPDATE outbox SET due_at = ? WHERE id = ?", [(again, row.id) for row in waiting]
        )
        entries = [bury(conn, self._letter(row, error), now) for row, error in dead]
        self._store.ledger.append(conn, worker.worker_id, entries, now)

    def _letter(self, row: Row, error: HoldfastError) -> Letter:
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
