"""`SqliteClerk`: what relays do for governance."""

from __future__ import annotations

import sqlite3

from ackbone.core.store import Worker
from ackbone.store.approvals import expire
from ackbone.store.unit import NOTHING_EXPIRES

from .approvals import OVERDUE
from .quotas import LOOK_AGAIN
from .store import SqliteStore


class SqliteClerk:
    """`Clerk` on the store's file."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def has_overdue(self) -> bool:
        now = self._store.clock.now_us()
        found = await self._store.file.read(lambda conn: conn.execute(OVERDUE, (now, 1)).fetchone())
        return found is not None

    async def expire(self, *, worker: Worker) -> int:
        if self._store.expiry_us(1) == NOTHING_EXPIRES:
            return 0
        return await self._store.write(expire, worker_id=worker.worker_id)

    async def quotas_changed(self) -> int:
        file = self._store.file

        def op(conn: sqlite3.Connection, now_us: int) -> int:
            conn.execute("UPDATE quotas SET deferred_until = NULL, deferred = 0")
            n = conn.execute(LOOK_AGAIN, (now_us,)).rowcount
            if n:
                file.wake_after_commit()
            return n

        return await self._store.write_rows(op)
