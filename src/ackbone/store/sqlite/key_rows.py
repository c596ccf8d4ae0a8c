"""Keys, conversations and quotas on SQLite, and the tasks that wait for them."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from ackbone.core.outcome import Status
from ackbone.core.store import Finished
from ackbone.sqlitefile import rows
from ackbone.store.conditions import UNENDED
from ackbone.store.quota_book import COLUMNS
from ackbone.store.tables import Holder, Pair, QuotaName, Waiter, Wanted
from ackbone.store.unit import Identity, Key, Lane

from .sql import SQL, TASK

_TAKE = (
    "INSERT OR IGNORE INTO idempotency_keys (subscription, state, created_at, tenant_id, key,"
    " message_id)"
)
_TAKE_ALIKE = (0,)
"""Tenant: a place in `Wanted`."""
_KEEP_ALIKE = (1, 2, 3)
"""End of the window, tenant and subscription: places in what `keep` writes."""
_KEY = "WHERE tenant_id = ? AND subscription = ? AND key = ?"
_HOLDER = f"SELECT message_id, state, value, expires_at FROM idempotency_keys {_KEY}"
_TAKE_OVER = (
    "UPDATE idempotency_keys SET message_id = ?, state = 'running', value = NULL,"
    f" expires_at = NULL {_KEY}"
)
_SOMEONE_WAITS = "SELECT 1 FROM queue_executions WHERE status = 'waiting_key' LIMIT 1"
_WAITING = (
    "SELECT q.rowid, q.tenant_id, q.subscription, q.message_id, q.queue_name, q.event_name,"
    " q.trace_id, q.idem_key, q.lane, k.message_id, k.state, k.value"
    " FROM queue_executions q LEFT JOIN idempotency_keys k ON k.tenant_id = q.tenant_id"
    " AND k.subscription = q.subscription AND k.key = q.idem_key"
    " WHERE q.status = 'waiting_key' AND (k.state IS NULL OR k.state = 'done')"
)
_WAITING_FOR = f"{_WAITING} AND q.tenant_id = ? AND q.subscription = ? AND q.idem_key = ?"
_DUPLICATE = (
    "UPDATE queue_executions SET status = 'duplicate', completed_at = ?4, result = ?5,"
    f" body = NULL, body_info = NULL WHERE {TASK}"
)
_READY = (
    f"UPDATE queue_executions SET status = 'ready', due_at = ?4 WHERE {TASK}"
    " AND status = 'waiting_key'"
)


def _keep_statement(values: str) -> str:
    return (
        "UPDATE idempotency_keys SET state = 'done', value = u.column1, expires_at = u.column2"
        f" FROM (VALUES {values}) u WHERE tenant_id = u.column3 AND subscription = u.column4"
        " AND key = u.column5 AND message_id = u.column6"
    )


class SqliteKeyRows:
    """`KeyRows` in one transaction of the writer thread."""

    def __init__(self, conn: sqlite3.Connection, now_us: int) -> None:
        self._conn = conn
        self._now_us = now_us

    async def take(
        self, subscription: str, wanted: Sequence[Wanted], *, expiry: bool
    ) -> Mapping[Pair, Holder]:
        shared = (subscription, "running", self._now_us)
        inserted = rows.insert(self._conn, _TAKE, wanted, shared=shared, alike=_TAKE_ALIKE)
        lost: dict[Pair, Holder] = {}
        if inserted == len(wanted):
            return lost
        for tenant_id, key, message_id in wanted:
            place = (tenant_id, subscription, key)
            *found, expires = self._conn.execute(_HOLDER, place).fetchone()
            holder = Holder(*found)
            if holder.message_id == message_id:
                continue
            over = expires is not None and expires <= self._now_us
            if expiry and over and holder.state == "done":
                self._conn.execute(_TAKE_OVER, (message_id, *place))
            else:
                lost[tenant_id, message_id] = holder
        return lost

    def keep(self, done: Sequence[Finished]) -> None:
        values: list[tuple[Any, ...]] = []
        for item in done:
            run = item.run
            until_us = self._now_us + int(item.dedup_window_s * 1e6)
            key = (run.message.tenant_id, run.subscription, run.idem_key)
            values.append((item.result, until_us, *key, run.message.id))
        rows.update(self._conn, _keep_statement, values, alike=_KEEP_ALIKE)

    def free(self, keys: Sequence[tuple[Key, str]]) -> None:
        for key, message_id in keys:
            self._conn.execute(SQL.operations.free_key, (*key, message_id))

    async def waiting(self, keys: Collection[Key] | None) -> Sequence[Waiter]:
        conn = self._conn
        if conn.execute(_SOMEONE_WAITS).fetchone() is None:  # nearly always
            return []
        if keys is None:
            found = conn.execute(_WAITING).fetchall()
        else:
            found = [row for key in keys for row in conn.execute(_WAITING_FOR, key)]
        return [Waiter(*row[1:]) for row in sorted(found, key=lambda each: int(each[0]))]

    async def end_as_duplicates(self, ended: Sequence[tuple[Identity, bytes | None]]) -> None:
        for identity, result in ended:
            self._conn.execute(_DUPLICATE, (*identity, self._now_us, result))

    async def make_ready(self, tasks: Sequence[Identity]) -> None:
        for identity in tasks:
            self._conn.execute(_READY, (*identity, self._now_us))


LANE_BUSY = (
    "SELECT 1 FROM queue_executions WHERE tenant_id = ? AND subscription = ? AND lane = ?"
    f" AND {UNENDED} LIMIT 1"
)
LANE_FIRST = (
    "SELECT rowid, status FROM queue_executions WHERE tenant_id = ? AND subscription = ?"
    f" AND lane = ? AND {UNENDED} ORDER BY lane_seq LIMIT 1"
)
_ADVANCE = "UPDATE queue_executions SET status = 'ready', due_at = ? WHERE rowid = ?"


class SqliteLaneRows:
    """`LaneRows` in one transaction of the writer thread."""

    def __init__(
        self,
        conn: sqlite3.Connection,
        now_us: int,
        require_alive: Callable[[int], Awaitable[None]],
    ) -> None:
        self._conn = conn
        self._now_us = now_us
        self._require_alive = require_alive

    async def own_source(self, subscription: str, worker_id: int) -> bool:
        await self._require_alive(worker_id)
        return (
            self._conn.execute(SQL.claims.own_source, (subscription, worker_id)).fetchone()
            is not None
        )

    async def lead(self, subscription: str) -> bool:
        return True  # the file has one writer at a time

    async def busy(self, subscription: str, lanes: Collection[Pair]) -> set[Pair]:
        return {
            (tenant_id, lane)
            for tenant_id, lane in lanes
            if self._conn.execute(LANE_BUSY, (tenant_id, subscription, lane)).fetchone()
        }

    async def advance(self, lanes: Collection[Lane]) -> int:
        advanced = 0
        for lane in lanes:
            found = self._conn.execute(LANE_FIRST, lane).fetchone()
            if found is not None and found[1] == Status.QUEUED:
                self._conn.execute(_ADVANCE, (self._now_us, found[0]))
                advanced += 1
        return advanced


READ = f"SELECT {COLUMNS} FROM quotas WHERE tenant_id = ? AND name = ?"
WRITE = (
    f"INSERT INTO quotas (tenant_id, name, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (tenant_id, name) DO UPDATE SET window_us = excluded.window_us,"
    " window_start = excluded.window_start, runs = excluded.runs,"
    " llm_calls = excluded.llm_calls, tokens = excluded.tokens, cost = excluded.cost,"
    " deferred_until = excluded.deferred_until, deferred = excluded.deferred"
)


class SqliteQuotaRows:
    """`QuotaRows` in one transaction of the writer thread."""

    def __init__(self, conn: sqlite3.Connection) -> None:
        self._conn = conn

    async def lock(self, names: Sequence[QuotaName]) -> Mapping[QuotaName, Sequence[Any]]:
        found = {name: self._conn.execute(READ, name).fetchone() for name in names}
        return {name: row for name, row in found.items() if row is not None}

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        for row in rows:
            self._conn.execute(WRITE, row)
