"""`queue_metrics`: what processes counted, kept for pages and reports."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ackbone.core.ids import uuid7_block
from ackbone.core.meter import MetricRow
from ackbone.store.unit import Change

from . import arrays
from .database import Tx
from .store import PostgresStore

_INSERT = (
    "INSERT INTO queue_metrics (id, tenant_id, queue_name, metric_name, metric_value, timestamp,"
    " tags) SELECT u.id, u.tenant_id, u.queue, u.name, u.value, clock_timestamp(), u.tags"
    " FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::float8[], $6::json[])"
    " u(id, tenant_id, queue, name, value, tags)"
)


class PostgresMetricRows:
    """`MetricRows` of the store's database."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def add(self, batch: Sequence[MetricRow]) -> None:
        async def op(tx: Tx, change: Change) -> None:
            tx.at_end(
                _INSERT,
                arrays.ids(uuid7_block(len(batch))),
                arrays.texts([row.tenant_id for row in batch]),
                arrays.texts([row.queue for row in batch]),
                arrays.texts([row.name for row in batch]),
                arrays.numbers(row.value for row in batch),
                arrays.texts([msgspec.json.encode(row.tags).decode() for row in batch]),
            )

        await self._store.write(op, worker_id=0, durable=False)
