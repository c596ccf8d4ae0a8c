"""The outbox: messages for a broker elsewhere, committed together with the change that sends them.

A row is published and then deleted. A crash between the two publishes it again under the same id,
which the store recognizes. While the broker is away, rows wait. A row that the broker refuses waits
by itself, and one that can never be published becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from ackbone.core.broker import Broker, Outgoing
from ackbone.core.codecs.codec import CODECS, stored_form
from ackbone.core.errors import AckboneError, BrokerError, InvalidMessage, StoreCorrupt
from ackbone.core.ids import uuid7_bytes
from ackbone.core.store import Send, Worker

from .base import BaseStore
from .outcomes import Letter, bury
from .unit import OUTGOING, Change, Tx

log = logging.getLogger("ackbone.outbox")

BATCH = 500
REFUSED_WAIT_S = 5.0


class Row(msgspec.Struct, frozen=True):
    """One row that is due."""

    id: str
    """The text by which the dialect's statements find the row again."""
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
        """The message of the row. Raises StoreCorrupt if the row is not what was written."""
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


def outbox_row(send: Send, now_us: int) -> tuple[Any, ...]:
    """Return a message as a row of `outbox`, its id as 16 bytes."""
    out = send.outgoing
    return (
        uuid7_bytes(),
        send.tenant_id,
        send.queue,
        out.id,
        msgspec.json.encode(dict(out.headers)).decode(),
        out.body,
        zlib.crc32(out.body),
        out.priority,
        out.key,
        None if out.ttl_s is None else int(out.ttl_s * 1e6),
        now_us + int(out.delay_s * 1e6),
        now_us,
    )


class Outbox:
    """One step publishes every row that is due. Run it under the role `outbox`."""

    def __init__(
        self,
        store: BaseStore[Any],
        broker_of: Callable[[str], Broker],
        *,
        codec_of: Callable[[str], str],
        name_of: Callable[[str], str] = lambda queue: "default",
    ) -> None:
        """`broker_of`, `name_of` and `codec_of` return the broker of a queue, its name and the
        codec of the queue."""
        self._store = store
        self._broker_of = broker_of
        self._codec_of = codec_of
        self._name_of = name_of

    async def due(self) -> bool:
        return bool(await self.due_rows(1))

    async def due_rows(self, limit: int, *, but: Collection[str] = ()) -> list[Row]:
        """The oldest rows that are due, those of the queues `but` left out."""
        statement = self._store.sql.maintenance.outbox_due
        found = await self._store.read_due(statement, limit, sorted(but))
        return [Row(*values) for values in found]

    async def step(self, worker: Worker) -> int:
        """Publish; returns how many messages were published.

        A queue whose broker is away or refuses it holds up no other. Its error is raised
        at the end.
        """
        published = 0
        away: dict[str, BrokerError] = {}
        while rows := await self.due_rows(BATCH, but=away):
            queues: dict[str, list[Row]] = {}
            for row in rows:
                queues.setdefault(row.queue, []).append(row)
            # Side by side: a broker that does not answer uses up its deadline.
            answers = await asyncio.gather(
                *(self._publish(queue, batch, worker) for queue, batch in queues.items()),
                return_exceptions=True,
            )
            for queue, answer in zip(queues, answers, strict=True):
                if isinstance(answer, BrokerError):
                    answer.broker = self._name_of(queue)
                    away[queue] = answer
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    published += answer
        if away:
            raise next(iter(away.values()))
        return published

    def subscribe(self) -> asyncio.Event:
        return self._store.subscribe_to(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)

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
        results = await self._broker_of(queue).publish(queue, outgoing) if outgoing else ()
        for row, result in zip(good, results, strict=True):
            if result.error is None:
                done.append(row)
            elif isinstance(result.error, InvalidMessage):
                dead.append((row, result.error))
            else:
                log.warning("message %s for %s waits: %s", row.message_id, queue, result.error)
                waiting.append(row)
        letters = [self._letter(row, error) for row, error in dead]
        await self._settle([*done, *(row for row, _ in dead)], waiting, letters, worker)
        return len(done)

    async def _settle(
        self, gone: Sequence[Row], waiting: Sequence[Row], letters: Sequence[Letter], worker: Worker
    ) -> None:
        """Delete rows, let others wait `REFUSED_WAIT_S`, and keep dead letters: one transaction."""

        async def op(tx: Tx, change: Change) -> None:
            now_us = await tx.moment()
            sql = tx.sql.maintenance
            tx.before_end(sql.outbox_delete, sorted(row.id for row in gone))
            if waiting:
                again_us = now_us + int(REFUSED_WAIT_S * 1e6)
                tx.before_end(sql.outbox_wait, sorted(row.id for row in waiting), again_us)
            change.entries += [bury(tx, letter, now_us) for letter in letters]

        # Not synced: a row that a crash brings back is published again, and recognized.
        await self._store.write(op, worker_id=worker.worker_id, durable=bool(letters))

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
