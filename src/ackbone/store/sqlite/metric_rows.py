"""`queue_metrics`: what processes counted, kept for pages and reports."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from ackbone.core.ids import uuid7_bytes
from ackbone.core.meter import MetricRow
from ackbone.sqlite import rows

from .store import SqliteStore

_INSERT = (
    "INSERT INTO queue_metrics (id, tenant_id, queue_name, metric_name, metric_value, timestamp,"
    " tags)"
)


class SqliteMetricRows:
    """`MetricRows` on the store's file."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def add(self, batch: Sequence[MetricRow]) -> None:
        def op(conn: sqlite3.Connection) -> None:
            now = self._store.clock.now_us()
            values = [
                (
                    uuid7_bytes(),
                    row.tenant_id,
                    row.queue,
                    row.name,
                    row.value,
                    now,
                    msgspec.json.encode(row.tags).decode(),
                )
                for row in batch
            ]
            rows.insert(conn, _INSERT, values)

        await self._store.file.write(op, durable=False)
