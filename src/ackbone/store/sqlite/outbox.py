"""The outbox table of the store's file."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence

from ackbone.core.store import Worker
from ackbone.sqlite.wake import OUTGOING
from ackbone.store.letters import Letter, bury
from ackbone.store.outbox import REFUSED_WAIT_S, Row

from .store import SqliteStore
from .tx import SqliteTx

_COLUMNS = (
    "id, tenant_id, queue_name, message_id, headers, body, body_crc, priority, ordering_key, ttl_us"
)
_DUE = f"SELECT {_COLUMNS} FROM outbox WHERE due_at <= ? ORDER BY due_at, id LIMIT ?"


class SqliteOutboxRows:
    """`OutboxRows` on the store's file."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def due(self, limit: int) -> Sequence[Row]:
        file = self._store.file

        def op(conn: sqlite3.Connection) -> list[Row]:
            # One snapshot for both: what is read here is published, nobody asks again.
            conn.execute("BEGIN")
            try:
                found = conn.execute(_DUE, (file.now_us(conn), limit)).fetchall()
            finally:
                conn.execute("ROLLBACK")
            return [Row(*values) for values in found]

        return await file.read(op)

    async def settle(
        self,
        *,
        gone: Sequence[Row],
        waiting: Sequence[Row],
        letters: Sequence[Letter],
        worker: Worker,
    ) -> None:
        def op(conn: sqlite3.Connection) -> None:
            now = self._store.clock.now_us()
            conn.executemany("DELETE FROM outbox WHERE id = ?", [(row.id,) for row in gone])
            again = now + int(REFUSED_WAIT_S * 1e6)
            conn.executemany(
                "UPDATE outbox SET due_at = ? WHERE id = ?", [(again, row.id) for row in waiting]
            )
            entries = [bury(SqliteTx(conn, now), letter, now) for letter in letters]
            self._store.ledger.append(conn, worker.worker_id, entries, now)

        await self._store.file.write(op, durable=bool(letters))

    def subscribe(self) -> asyncio.Event:
        return self._store.file.subscribe(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)
