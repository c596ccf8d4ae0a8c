"""`queue_metrics`: what processes counted, kept for pages and reports."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ackbone.core.ids import new_id
from ackbone.core.meter import MetricRow

from .unit import Change, Tx, UnitOfWork


class StoreMetricRows:
    """`MetricRows` of a store."""

    def __init__(self, store: UnitOfWork) -> None:
        self._store = store

    async def add(self, batch: Sequence[MetricRow]) -> None:
        async def op(tx: Tx, change: Change) -> None:
            now_us = await tx.moment()
            for row in batch:
                tags = msgspec.json.encode(row.tags).decode()
                values = (new_id(), row.tenant_id, row.queue, row.name, row.value, now_us, tags)
                tx.at_end(tx.sql.maintenance.add_metric, *values)

        await self._store.write(op, worker_id=0, durable=False)
