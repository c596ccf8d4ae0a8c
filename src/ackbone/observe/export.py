"""Rows for `queue_metrics`: the counts of this process since its last export, by tenant.

Every process writes its own rows, tagged with its worker id, and readers add them up
(docs/reference/metrics.md says how).

Counts by channel have the channel's name instead of the queue's. Gauges, recognized copies and
waits for a dedup store have no tenant; their rows have the tenant `default`.

A count that did not change writes no row. The gauge distinguishes an idle process from a dead one.
A killed process loses at most the counts of one interval. For exact numbers, count the ledger's
events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ackbone.core.meter import MetricRow, MetricRows
from ackbone.core.store import Worker

from .metrics import ACTIVE, Metrics, Place


class Exporter:
    """Exports counts. Each step writes the counts since the last one. A failed step loses
    nothing."""

    def __init__(
        self,
        metrics: Metrics,
        rows: MetricRows,
        *,
        queues: Callable[[str], bool] = lambda queue: True,
        channels: bool = True,
        off: Collection[str] = (),
    ) -> None:
        """`queues`: the queues to export. `channels`: export replies, too. `off`: queues of this
        process that get no rows.
        """
        self._metrics = metrics
        self._rows = rows
        self._queues = queues
        self._channels = channels
        self._off = frozenset(off)
        metrics.keep_growth()

    async def step(self, worker: Worker) -> int:
        """Write the rows. Returns how many."""
        tag: dict[str, str | int] = {"worker": worker.worker_id}
        rows = [
            MetricRow(queue=queue, name=ACTIVE, value=number, tags=tag)
            for queue, number in self._metrics.active().items()
            if self._queues(queue) and queue not in self._off
        ]
        growth = self._metrics.take_growth(self._is_mine)
        rows += [
            MetricRow(
                tenant_id=place.tenant_id,
                queue=place.name,
                name=name,
                value=value,
                tags={**tag, "status": status} if status else tag,
            )
            for place, counted in growth.items()
            if place.label != "queue" or place.name not in self._off
            for (name, status), value in counted.items()
            if value
        ]
        try:
            if rows:
                await self._rows.add(rows)
        except BaseException:
            self._metrics.give_back(growth)
            raise
        return len(rows)

    def _is_mine(self, place: Place) -> bool:
        return self._queues(place.name) if place.label == "queue" else self._channels
