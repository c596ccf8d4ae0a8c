"""The metrics of one process, under the names that dashboards and alerts use.

`HELP` lists them; docs/reference/metrics.md adds labels and kinds. Replies are counted in
`delivery_counts`.

The ends of messages are taken from the ledger's events, so that each counts once, whatever caused
it. The hot path adds to plain numbers. Objects of Prometheus are made only when it asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ackbone.core import events
from ackbone.core.message import DEFAULT_TENANT
from ackbone.core.outcome import RECORD_WORDS, Dead, Discarded, Done, Park, Released, Retry
from ackbone.core.store import Finished

from . import delivery_counts
from .delivery_counts import DeliveryCounts

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

CONSUMED = "queue_messages_consumed_total"
DURATION = "queue_processing_duration_seconds"
DELAY = "queue_consume_delay_seconds"
ACTIVE = "queue_active_workers"
DEDUP_HITS = "queue_dedup_hits_total"
DEDUP_UNAVAILABLE = "queue_dedup_unavailable_total"
LLM_CALLS = "queue_llm_calls_total"
LLM_TOKENS = "queue_llm_tokens_total"
RETRIES = "queue_retries_total"
RECLAIMED = "queue_reclaimed_total"
DEAD_LETTERED = "queue_dead_lettered_total"

HELP = {
    CONSUMED: "Messages that ended, by how they ended",
    DURATION: "Seconds that one run of a handler took",
    DELAY: "Seconds from the creation of a message until it was first taken up",
    ACTIVE: "Slots of this process that take messages",
    DEDUP_HITS: "Duplicates and further copies that were recognized",
    DEDUP_UNAVAILABLE: "Messages that waited because the dedup store was away",
    LLM_CALLS: "Calls of language models",
    LLM_TOKENS: "Tokens of language models",
    RETRIES: "Failed runs that are tried again",
    RECLAIMED: "Messages taken back from dead workers",
    DEAD_LETTERED: "Messages kept as dead letters",
    **delivery_counts.HELP,
}
COUNTERS = (
    DEDUP_HITS,
    DEDUP_UNAVAILABLE,
    LLM_CALLS,
    LLM_TOKENS,
    RETRIES,
    RECLAIMED,
    DEAD_LETTERED,
)
_FIELDS = {DURATION: "duration", DELAY: "delay"}
"""The histograms, and their fields in `QueueCounts`."""
STATUSES = tuple(RECORD_WORDS.values())
BUCKETS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0,
    3600.0,
)  # fmt: skip
"""Bucket limits in seconds, from a no-op to an agent that runs for an hour."""
_BUCKETS_US = tuple(round(limit * 1e6) for limit in BUCKETS)

_STATUS_OF_EVENT = {events.EVENT_OF_STATUS[status]: word for status, word in RECORD_WORDS.items()}
_COUNTER_OF_EVENT = {
    events.RETRIED: RETRIES,
    events.RECLAIMED: RECLAIMED,
    events.DLQ: DEAD_LETTERED,
    events.DUPLICATE: DEDUP_HITS,
}
_COUNTED = frozenset({*_STATUS_OF_EVENT, *_COUNTER_OF_EVENT})
_DURATION_SUM, _DURATION_COUNT = (f"{DURATION}_sum", ""), (f"{DURATION}_count", "")
_DELAY_SUM, _DELAY_COUNT = (f"{DELAY}_sum", ""), (f"{DELAY}_count", "")
_RAN = frozenset({Done, Retry, Dead, Discarded})
_NOT_BEGUN = frozenset({Park, Released})


class Histogram:
    """A histogram: counts by bucket, and the sum."""

    __slots__ = ("buckets", "sum")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe_us(self, values: list[int]) -> None:
        """Add values, in microseconds. They are sorted first, because most batches fall into one or
        two buckets and are counted there at once."""
        values.sort()
        counted = 0
        for bucket, limit in enumerate(_BUCKETS_US):
            if counted == len(values):
                break
            within = bisect_right(values, limit)
            self.buckets[bucket] += within - counted
            counted = within
        self.buckets[-1] += len(values) - counted
        self.sum += sum(values) / 1e6

    @property
    def count(self) -> int:
        return sum(self.buckets)


class Place(NamedTuple):
    """A tenant's share of a queue or channel, for rows of `queue_metrics`."""

    tenant_id: str
    label: str
    """The kind of `name`: `queue` or `channel`."""
    name: str


Growth = dict[Place, dict[tuple[str, str], float]]
"""Counts of each place, by metric and status. The status is empty for metrics without one."""


class QueueCounts:
    """The metrics of one queue."""

    __slots__ = ("consumed", "counters", "delay", "duration")

    def __init__(self) -> None:
        self.consumed = dict.fromkeys(STATUSES, 0)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.duration = Histogram()
        self.delay = Histogram()


class Metrics:
    """A meter for the engine and a listener of the store. `registry` is for Prometheus."""

    def __init__(self, *, queue_of: Mapping[str, str] | None = None) -> None:
        self._queues: dict[str, QueueCounts] = {}
        self._replies = DeliveryCounts()
        self._queue_of = dict(queue_of or {})
        """Queues by subscription, where their names differ."""
        self._serving: list[Callable[[], Mapping[str, int]]] = []
        self._registry: CollectorRegistry | None = None
        self._growth: Growth | None = None
        """Counts since the last export, by tenant. None: they are not exported. Prometheus gets no
        tenants, because it does not cope with labels of thousands of values."""

    # -- counting ---------------------------------------------------------------------------------

    def hear(self, entries: Sequence[events.Entry]) -> None:
        """Count committed events of the ledger."""
        kinds = {entry[3] for entry in entries}  # faster than looking at each
        if not kinds.isdisjoint(delivery_counts.COUNTED):
            self._replies.hear(entries, self._reply_grew)
        if kinds.isdisjoint(_COUNTED):
            return
        heard = Counter(
            (kind, data.get("queue") or self._queue_of.get(subscription, subscription), tenant_id)
            for tenant_id, subscription, _task, kind, data in entries
            if kind in _COUNTED
        )
        for (kind, queue, tenant_id), number in heard.items():
            status = _STATUS_OF_EVENT.get(kind)
            counter = _COUNTER_OF_EVENT.get(kind)
            counts = self._of(queue)
            if status is not None:
                counts.consumed[status] += number
                self._grew(tenant_id, queue, CONSUMED, number, status)
            if counter is not None:
                counts.counters[counter] += number
                self._grew(tenant_id, queue, counter, number)

    def ran(self, batch: Sequence[Finished]) -> None:
        groups: dict[tuple[str, str], list[Finished]] = {}
        for item in batch:
            run = item.run
            groups.setdefault((run.queue, run.message.tenant_id), []).append(item)
        by_queue: dict[str, tuple[list[int], list[int]]] = {}
        for (queue, tenant_id), items in groups.items():
            durations, delays = self._ran(queue, tenant_id, items)
            of_queue = by_queue.setdefault(queue, ([], []))
            of_queue[0].extend(durations)
            of_queue[1].extend(delays)
        for queue, (durations, delays) in by_queue.items():
            counts = self._of(queue)
            counts.duration.observe_us(durations)
            counts.delay.observe_us(delays)

    def _ran(
        self, queue: str, tenant_id: str, items: Sequence[Finished]
    ) -> tuple[list[int], list[int]]:
        """Count the usage of one tenant's runs. Returns their durations and delays."""
        durations: list[int] = []
        delays: list[int] = []
        calls = tokens = 0
        for item in items:
            run, kind = item.run, type(item.outcome)
            if kind in _RAN:
                durations.append(item.finished_at_us - item.started_at_us)
            first_time = run.attempt == 1 or run.failures == 0
            if first_time and kind not in _NOT_BEGUN:
                delay_us = run.claimed_at_us - run.created_at_us
                delays.append(delay_us if delay_us > 0 else 0)
            if item.usage is not None:
                calls += item.usage.llm_calls
                tokens += item.usage.tokens
        if calls or tokens:
            counters = self._of(queue).counters
            counters[LLM_CALLS] += calls
            counters[LLM_TOKENS] += tokens
        if self._growth is not None:
            grown = self._grown(Place(tenant_id, "queue", queue))
            grown[LLM_CALLS, ""] += calls
            grown[LLM_TOKENS, ""] += tokens
            grown[_DURATION_SUM] += sum(durations) / 1e6
            grown[_DURATION_COUNT] += len(durations)
            grown[_DELAY_SUM] += sum(delays) / 1e6
            grown[_DELAY_COUNT] += len(delays)
        return durations, delays

    def recognized(self, queue: str, copies: int) -> None:
        self._of(queue).counters[DEDUP_HITS] += copies
        self._grew(DEFAULT_TENANT, queue, DEDUP_HITS, copies)

    def dedup_unavailable(self, queue: str, messages: int) -> None:
        self._of(queue).counters[DEDUP_UNAVAILABLE] += messages
        self._grew(DEFAULT_TENANT, queue, DEDUP_UNAVAILABLE, messages)

    def _grew(self, tenant_id: str, queue: str, name: str, number: int, status: str = "") -> None:
        if self._growth is not None:
            self._grown(Place(tenant_id, "queue", queue))[name, status] += number

    def _reply_grew(self, tenant_id: str, name: str, channel: str, status: str) -> None:
        if self._growth is not None:
            self._grown(Place(tenant_id, "channel", channel))[name, status] += 1

    def _grown(self, place: Place) -> dict[tuple[str, str], float]:
        growth = self._growth
        assert growth is not None  # noqa: S101 - the caller has checked it
        found = growth.get(place)
        if found is None:
            found = growth[place] = defaultdict(float)
        return found

    def watch(self, serving: Callable[[], Mapping[str, int]]) -> None:
        """Set the function that returns `queue_active_workers`: slots that take messages, by
        queue."""
        self._serving.append(serving)

    def _of(self, queue: str) -> QueueCounts:
        counts = self._queues.get(queue)
        if counts is None:
            counts = self._queues[queue] = QueueCounts()
        return counts

    # -- reading ----------------------------------------------------------------------------------

    def read(self, name: str, **labels: str) -> float:
        """Return the value now, summed over labels that are not given. 0 if it was never counted.

        A histogram is read as `<name>_count` and `<name>_sum`.
        """
        if name not in NAMES:
            raise KeyError(
                f"there is no metric {name!r}; the metrics are {', '.join(sorted(NAMES))}"
            )
        return sum(
            value
            for found, of, value in self.values()
            if found == name and all(of.get(key) == text for key, text in labels.items())
        )

    def values(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield every value: name, labels, number. Histograms yield their sum and count."""
        for queue, number in self.active().items():
            yield ACTIVE, {"queue": queue}, number
        for queue, counts in list(self._queues.items()):
            labels = {"queue": queue}
            for status, number in counts.consumed.items():
                yield CONSUMED, {**labels, "status": status}, number
            for name, number in counts.counters.items():
                yield name, labels, number
            for name, field in _FIELDS.items():
                histogram: Histogram = getattr(counts, field)
                yield f"{name}_sum", labels, histogram.sum
                yield f"{name}_count", labels, histogram.count
        yield from self._replies.values()

    def keep_growth(self) -> None:
        """Count by tenant from now on, for `take_growth`. Earlier counts have no tenant."""
        if self._growth is None:
            self._growth = {}
            for name, labels, value in self.values():
                if name != ACTIVE:
                    label = "queue" if "queue" in labels else "channel"
                    place = Place(DEFAULT_TENANT, label, labels[label])
                    self._grown(place)[name, labels.get("status", "")] += value

    def take_growth(self, mine: Callable[[Place], bool]) -> Growth:
        """Return the counts since the last call, and start over."""
        growth = self._growth or {}
        return {place: growth.pop(place) for place in list(growth) if mine(place)}

    def give_back(self, growth: Growth) -> None:
        """Put counts back that could not be exported, for the next export."""
        for place, counted in growth.items():
            grown = self._grown(place)
            for key, value in counted.items():
                grown[key] += value

    def active(self) -> dict[str, int]:
        """Return the slots that take messages, by queue."""
        found: dict[str, int] = {}
        for serving in self._serving:
            for queue, number in serving().items():
                found[queue] = found.get(queue, 0) + number
        return found

    @property
    def registry(self) -> CollectorRegistry:
        """The registry for Prometheus: `prometheus_client.generate_latest(metrics.registry)`."""
        if self._registry is None:
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry(auto_describe=False)
            self._registry.register(self)
        return self._registry

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families. Prometheus calls this; see `registry`."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        queues = list(self._queues.items())
        by_name: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for name, of, value in self.values():
            by_name[name].append((of, value))
        for name, words in HELP.items():
            if name in _FIELDS:
                histogram = HistogramMetricFamily(name, words, labels=["queue"])
                for queue, counts in queues:
                    found: Histogram = getattr(counts, _FIELDS[name])
                    histogram.add_metric([queue], _cumulative(found), found.sum)
                yield histogram
                continue
            labels = ["channel" if name in delivery_counts.HELP else "queue"]
            labels += ["status"] if name in (CONSUMED, delivery_counts.REPLIES) else []
            kind = GaugeMetricFamily if name == ACTIVE else CounterMetricFamily
            family = kind(name, words, labels=labels)
            for of, value in by_name[name]:
                family.add_metric([of[label] for label in labels], value)
            yield family


NAMES = frozenset(
    {CONSUMED, ACTIVE, *COUNTERS, *delivery_counts.HELP}
    | {f"{name}_{part}" for name in _FIELDS for part in ("sum", "count")}
)


def _cumulative(histogram: Histogram) -> list[tuple[str, Any]]:
    total = 0
    found: list[tuple[str, Any]] = []
    for limit, number in zip((*map(str, BUCKETS), "+Inf"), histogram.buckets, strict=True):
        total += number
        found.append((limit, total))
    return found
