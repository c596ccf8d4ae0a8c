"""Rows for `queue_metrics`: what this process counted since its last export.

Every process writes its own rows, tagged with its worker's number, so that none has to know of the
others, and whoever reads adds them up:

| kind      | rows                              | value                     | to read       |
|-----------|-----------------------------------|---------------------------|---------------|
| counter   | one for each label set that moved | growth since the last one | sum           |
| histogram | `<name>_sum` and `<name>_count`   | growth since the last one | sums          |
| gauge     | one for each queue, always        | the value at that moment  | latest of all |

What is counted by channel stands under the channel's name in place of the queue's.

A count that did not move writes no row; the gauge tells an idle process from a dead one. What a
killed process had not exported yet is lost with it, one interval at most: the exact count of ends
is the ledger's.
"""

from __future__ import annotations

from holdfast.core.meter import MetricRow, MetricRows
from holdfast.core.store import Worker

from .metrics import ACTIVE, Metrics

_PLACES = ("queue", "channel")
_Key = tuple[str, tuple[tuple[str, str], ...]]


class Exporter:
    """One step writes what was counted since the one before. A failed one loses nothing."""

    def __init__(self, metrics: Metrics, rows: MetricRows) -> None:
        self._metrics = metrics
        self._rows = rows
        self._exported: dict[_Key, float] = {}

    async def step(self, worker: Worker) -> int:
        """Returns how many rows were written."""
        values: dict[_Key, float] = {}
        rows: list[MetricRow] = []
        for name, labels, value in self._metrics.values():
            tags: dict[str, str | int] = {"worker": worker.worker_id}
            tags.update((key, text) for key, text in labels.items() if key not in _PLACES)
            if name == ACTIVE:
                shown = value
            else:
                key = (name, tuple(sorted(labels.items())))
                values[key] = value
                shown = value - self._exported.get(key, 0.0)
                if shown == 0:
                    continue
            place = next(labels[key] for key in _PLACES if key in labels)
            rows.append(MetricRow(queue=place, name=name, value=shown, tags=tags))
        if rows:
            await self._rows.add(rows)
        self._exported = values
        return len(rows)
