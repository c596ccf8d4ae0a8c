"""The deliveries table: replies that were committed with their runs, and where they are now."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.core import events
from holdfast.core.delivery import Outbound
from holdfast.core.store import Worker
from holdfast.sqlite.wake import OUTGOING

from .ledger import Entry
from .store import SqliteStore

_TAKE = (
    "UPDATE deliveries SET status = 'sending', worker_id = ?, last_attempt_at = ? WHERE rowid IN"
    " (SELECT rowid FROM deliveries WHERE channel = ? AND status = 'pending' AND due_at <= ?"
    " ORDER BY created_at, rowid LIMIT ?) AND status = 'pending'"
    " RETURNING rowid, created_at, id, tenant_id, channel, recipient, content, conversation,"
    " task_id"
)
_MINE = " WHERE id IN (SELECT value FROM json_each(?)) AND status = 'sending' AND worker_id = ?"


class SqliteDeliveries:
    """`Deliveries` on the store's file. Each step is a compare-and-set on the row's status."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def waiting(self, channel: str) -> bool:
        now = self._store.clock.now_us()
        return await self._store.file.read(
            lambda conn: (
                conn.execute(
                    "SELECT 1 FROM deliveries WHERE channel = ? AND status = 'pending'"
                    " AND due_at <= ? LIMIT 1",
                    (channel, now),
                ).fetchone()
                is not None
            )
        )

    async def take(self, channel: str, *, limit: int, worker: Worker) -> Sequence[Outbound]:
        def op(conn: sqlite3.Connection) -> list[Any]:
            now = self._store.clock.now_us()
            return conn.execute(_TAKE, (worker.worker_id, now, channel, now, limit)).fetchall()

        # Not synced: if a power cut takes it back, nothing was marked and all is pending.
        found = await self._store.file.write(op, durable=False)
        names = Outbound.__struct_fields__
        found.sort(key=lambda row: (row[1], row[0]))  # RETURNING keeps no order
        return [Outbound(**dict(zip(names, row[2:], strict=True))) for row in found]

    async def sent(self, ids: Sequence[str], *, worker: Worker) -> None:
        def op(conn: sqlite3.Connection) -> None:
            found = conn.execute(
                f"UPDATE deliveries SET status = 'sent', last_error = NULL{_MINE}"
                " RETURNING tenant_id, subscription, task_id, id, channel",
                _mine(ids, worker),
            ).fetchall()
            entries: list[Entry] = [
                (tenant, sub or "", task or "", events.DELIVERY_SENT, _sent_data(id_, channel))
                for tenant, sub, task, id_, channel in found
            ]
            now = self._store.clock.now_us()
            self._store.ledger.append(conn, worker.worker_id, entries, now)

        await self._store.file.write(op)

    async def give_back(self, ids: Sequence[str], *, worker: Worker, error: str) -> None:
        await self._store.file.write(
            lambda conn: conn.execute(
                f"UPDATE deliveries SET last_error = ?, status = 'pending'{_MINE}",
                (error[:1000], *_mine(ids, worker)),
            )
        )

    async def recover(self, channel: str, *, worker: Worker) -> int:
        return await self._store.file.write(
            lambda conn: (
                conn.execute(
                    "UPDATE deliveries SET status = 'pending' WHERE channel = ?"
                    " AND status = 'sending' AND (worker_id IS NULL OR worker_id NOT IN"
                    " (SELECT worker_id FROM workers WHERE state = 'alive' AND worker_id != ?))",
                    (channel, worker.worker_id),
                ).rowcount
            )
        )

    def subscribe(self) -> asyncio.Event:
        return self._store.file.subscribe(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)


def _mine(ids: Sequence[str], worker: Worker) -> tuple[str, int]:
    return msgspec.json.encode(ids).decode(), worker.worker_id


def _sent_data(delivery_id: str, channel: str) -> dict[str, str]:
    return {"delivery_id": delivery_id, "channel": channel}
