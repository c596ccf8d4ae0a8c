"""`SqliteRecords`: the store, and the queue beside it, as operators read them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from ackbone.core.records import Count, LedgerEvent, Waiting, WorkerState
from ackbone.sqlitefile.file import SqliteFile
from ackbone.sqlitefile.sharing import OUTGOING, WORK, is_alive
from ackbone.store.record_rows import waiting_of_row
from ackbone.store.records import StoreRecords
from ackbone.store.sql import worded
from ackbone.store.sql.records import EVENT
from ackbone.store.unit import Row

from .sql import SQL, WORDS
from .store import parameters

_SENT = (
    "SELECT queue, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),"
    " min(sent_at) FILTER (WHERE state = 0) FROM messages GROUP BY queue"
)
_SENT_WITH_TEXT = (
    "SELECT queue, message_id, state, priority, lane, sent_at, due_at, expires_at, headers,"
    " body, body_crc FROM messages WHERE message_id = ?1 OR instr(body, ?2) > 0"
    " ORDER BY message_id <> ?1, seq LIMIT ?3"
)
_EVENTS_AFTER = f"{worded(EVENT, WORDS)} WHERE rowid > ?1 ORDER BY rowid LIMIT ?2"
_LAST_POSITION = "SELECT max(rowid) FROM event_log"
_NEXT_EVENT = "SELECT rowid, created_at FROM event_log WHERE rowid >= ?1 ORDER BY rowid LIMIT 1"


class SqliteRecords(StoreRecords):
    """`Records` on one SQLite file; `queues` are the files of brokers."""

    def __init__(
        self, file: SqliteFile, *, queues: Sequence[SqliteFile] = (), lease_s: float = 10.0
    ) -> None:
        super().__init__(lambda statement, *values: _read(file, statement, values), SQL)
        self._file = file
        self._queues = queues or [file]
        self._lease_s = lease_s

    async def waiting_with(self, text: str, *, limit: int) -> Sequence[Waiting]:
        part = text.encode("utf-8", "surrogatepass")
        found: list[Row] = []
        for queue in self._queues:
            found += await _read(queue, _SENT_WITH_TEXT, (text, part, limit))
        return [waiting_of_row(row) for row in found[:limit]]

    async def workers(self) -> Sequence[WorkerState]:
        """A worker is alive as long as it holds the lock on its own file."""
        folder, clock = self._file.workers_folder, self._file.clock

        def looked(worker: WorkerState) -> WorkerState:
            alive = is_alive(folder, worker.worker_id, lease_s=self._lease_s, clock=clock)
            return msgspec.structs.replace(worker, alive=alive)

        found = await super().workers()
        return await asyncio.to_thread(lambda: [looked(worker) for worker in found])

    async def _now_us(self) -> int:
        return self._file.clock.now_us()

    async def _sent(self) -> list[Row]:
        return [row for queue in self._queues for row in await _read(queue, _SENT)]

    # -- the ledger, whose positions are its row numbers ------------------------------------------

    async def event_counts(self, since_us: int) -> Sequence[Count]:
        first = await self._first_since(since_us)
        return await self._counted(self._sql.records.event_counts, since_us, first)

    async def events_after(
        self, position: int, *, limit: int, since_us: int | None = None
    ) -> Sequence[LedgerEvent]:
        if since_us is not None:
            position = max(position, await self._first_since(since_us) - 1)
        return self._events(await self._read(_EVENTS_AFTER, position, limit))

    async def last_position(self, *, back: int = 0) -> int:
        ((last,),) = await self._read(_LAST_POSITION)
        return max(0, (last or 0) - back)

    async def _first_since(self, since_us: int) -> int:
        """Position of the first event from a time on, by halving: the ledger grows in the order of
        time."""
        low, high = 1, await self.last_position() + 1
        while low < high:
            middle = (low + high) // 2
            found = await self._read(_NEXT_EVENT, middle)
            if found and found[0][1] < since_us:
                low = found[0][0] + 1
            else:
                high = middle
        return low

    def subscribe(self) -> asyncio.Event:
        return self._file.subscribe(WORK, OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._file.unsubscribe(event)


async def _read(file: SqliteFile, statement: str, values: tuple[Any, ...] = ()) -> list[Row]:
    return await file.read(lambda conn: conn.execute(statement, parameters(values)).fetchall())
