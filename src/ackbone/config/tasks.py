"""Settings of the task protocol."""

from __future__ import annotations

import msgspec

from ackbone.core.codecs.task import TaskCodec
from ackbone.core.task_protocol import TaskProtocol

from .queues import DAY_S, Days, Queue, Retries, Span, Time

CODEC = TaskCodec.name


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """The task protocol: defaults of queues with the codec `task`."""

    stream: str = "stream:task"
    """The queue of tasks. `default_queue` may name it."""
    group: str = "cg:workers"
    results: str = "stream:result"
    dead_letters: str = "stream:dlq"
    max_retries: Retries = 3
    """Also the variable MAX_RETRIES."""
    retry_delays_s: tuple[Time, ...] = (60.0, 300.0, 900.0)
    results_days: Days | None = 7.0
    """Older results are removed from their stream; null: never."""
    dead_letters_days: Days | None = 30.0
    """The same for copies of dead letters; the store keeps its own."""
    heartbeat_interval_s: Span = 30.0
    """How often the lease of a running task is renewed at the broker. Also the variable
    HEARTBEAT_INTERVAL_S."""
    visibility_timeout_s: Span | None = None
    """On Redis, how long an entry may stay without a renewed lease before another worker takes it.
    Null: the broker's own default. Also the variable VISIBILITY_TIMEOUT_S; a value in the broker's
    URL wins."""

    def complete(self, name: str, queue: Queue) -> Queue:
        """Return the queue with defaults for its open settings, except those of `retry`."""
        codec = queue.codec or (CODEC if name == self.stream else "standard")
        if codec != CODEC:
            return queue.complete(codec, group="ackbone", ordered=True, dedup_window_s=3600.0)
        waits = queue.waits_s is None and queue.base_delay_s is None
        return queue.complete(
            codec,
            group=self.group,
            ordered=False,
            dedup_window_s=30 * DAY_S,
            results=self.results,
            dead_letters=self.dead_letters,
            max_retries=self.max_retries,
            waits_s=self.retry_delays_s if waits else None,
        )

    def protocol(self, queue: Queue, *, max_retries: int) -> TaskProtocol | None:
        """Return what the queue has in addition to others. None: its messages are no tasks."""
        return TaskProtocol(max_retries=max_retries) if queue.codec == CODEC else None
