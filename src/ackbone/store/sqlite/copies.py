"""`SqliteCopies`: messages that wait for the broker to bring their copy back."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from ackbone.core.endings import Identity
from ackbone.core.store import Worker
from ackbone.store.copies import ERROR, Lost
from ackbone.store.letters import bury
from ackbone.store.stored import UNCOMMON

from .keys import free_key, resolve_key
from .ledger import Entry
from .store import SqliteStore
from .tx import SqliteTx

WAITING = (
    "SELECT tenant_id, message_id FROM queue_executions WHERE status = 'open'"
    f" AND {UNCOMMON} AND subscription = ? AND due_at <= ? ORDER BY due_at LIMIT ?"
)
END = (
    "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, completed_at = ?,"
    " error_message = ? WHERE tenant_id = ? AND message_id = ? AND subscription = ?"
    " AND status = 'open' AND due_at <= ?"
    " RETURNING tenant_id, subscription, message_id, queue_name, event_name, attempt, crashes,"
    " idem_key, history, trace_id"
)


class SqliteCopies:
    """`Copies` on the store's file."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def waiting(self, subscription: str, *, for_s: float, limit: int) -> Sequence[Identity]:
        before_us = self._store.clock.now_us() - int(for_s * 1e6)
        return await self._store.file.read(
            lambda conn: conn.execute(WAITING, (subscription, before_us, limit)).fetchall()
        )

    async def end(
        self, subscription: str, lost: Sequence[Identity], *, for_s: float, worker: Worker
    ) -> int:
        def op(conn: sqlite3.Connection, now_us: int) -> int:
            before_us = now_us - int(for_s * 1e6)
            entries: list[Entry] = []
            ended = 0
            for identity in lost:
                values = (now_us, ERROR, *identity, subscription, before_us)
                for row in conn.execute(END, values).fetchall():
                    entries += _let_go(conn, Lost(*row), now_us)
                    ended += 1
            self._store.ledger.append(conn, worker.worker_id, entries, now_us)
            self._store.file.wake_after_commit()
            return ended

        return await self._store.write_rows(op)


def _let_go(conn: sqlite3.Connection, task: Lost, now_us: int) -> list[Entry]:
    """Its events, and those of a message that waited for its key."""
    entries: list[Entry] = [task.failed(), bury(SqliteTx(conn, now_us), task.letter(), now_us)]
    if task.key is not None:
        free_key(conn, task.tenant_id, task.subscription, task.key, task.message_id)
        entries += resolve_key(conn, task.tenant_id, task.subscription, task.key, now_us)
    return entries
