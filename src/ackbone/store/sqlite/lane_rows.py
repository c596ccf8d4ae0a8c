"""Conversations on SQLite: their sources, and which of their tasks is next."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Collection

from ackbone.core.outcome import Status
from ackbone.store.conditions import UNENDED
from ackbone.store.tables import Pair
from ackbone.store.unit import Lane

from .sql import SQL

LANE_BUSY = (
    "SELECT 1 FROM queue_executions WHERE tenant_id = ? AND subscription = ? AND lane = ?"
    f" AND {UNENDED} LIMIT 1"
)
LANE_FIRST = (
    "SELECT rowid, status FROM queue_executions WHERE tenant_id = ? AND subscription = ?"
    f" AND lane = ? AND {UNENDED} ORDER BY lane_seq LIMIT 1"
)
_READY = "UPDATE queue_executions SET status = 'ready', due_at = ? WHERE rowid = ?"


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
                self._conn.execute(_READY, (self._now_us, found[0]))
                advanced += 1
        return advanced
