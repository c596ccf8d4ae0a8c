"""Settings of queues, and what the task protocol makes of those that are left open."""

from __future__ import annotations

from typing import Literal

import msgspec

from ackbone.core.broker import Notices
from ackbone.core.task_codec import TaskCodec

from .ranges import AckPolicy, Days, Factor, Retries, Share, Span, Time

DAY_S = 86_400.0
TASK = TaskCodec.name


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how long to wait, unless a queue says otherwise."""

    max_retries: Retries = 3
    """Retries after the first attempt."""
    base_delay_s: Time = 1.0
    max_delay_s: Time = 60.0
    backoff_factor: Factor = 2.0
    waits_s: tuple[Time, ...] = ()
    """The waits one by one, instead of the growing ones; the last one repeats."""
    jitter: Share = 0.1
    """Up to this share is added to a wait."""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """One queue. Its retry settings are those of `retry` where nothing is said here."""

    codec: str = ""
    """Wire form of the messages: standard, json, text, binary or task. Empty: standard, and task
    for the stream of `tasks`."""
    group: str | None = None
    """Who reads it, where the broker has consumer groups; null: ackbone, tasks: `tasks.group`."""
    tenant: str | None = None
    """The tenant of every message; null: each message names its own."""
    ordered: bool | None = None
    """Messages with an ordering key run one after the other; null: yes, tasks: no."""
    ack_policy: AckPolicy = "dlq"
    """What the broker is told when a message finally fails."""
    dedup: bool = True
    """Whether idempotency keys are looked at."""
    dedup_window_s: Span | None = None
    """So long a key stays known once it is done; null: an hour, tasks: 30 days."""
    max_retries: Retries | None = None
    base_delay_s: Time | None = None
    max_delay_s: Time | None = None
    backoff_factor: Factor | None = None
    waits_s: tuple[Time, ...] | None = None
    jitter: Share | None = None
    ttl_s: Span | None = None
    """Messages without an expiry of their own expire after so long."""
    timeout_s: Span | None = None
    """Limit of one run, unless the handler has its own."""
    on_parked: Literal["wait", "skip"] = "wait"
    """Whether a parked message holds up its conversation."""
    results: str | None = None
    """The queue that gets one entry for each message that ends; null: none, tasks: `tasks.results`.
    Empty: none."""
    dead_letters: str | None = None
    """The queue that gets a copy of each dead letter; null: none, tasks: `tasks.dead_letters`.
    Empty: none."""
    paused: bool = False

    @property
    def notices(self) -> Notices | None:
        """Who is told of its messages' ends, if anybody is."""
        if not self.results and not self.dead_letters:
            return None
        return Notices(results=self.results or None, dead_letters=self.dead_letters or None)


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """The task protocol: what holds for queues with the codec `task` that say nothing else."""

    stream: str = "stream:task"
    """Where tasks are sent, and what a worker on Redis reads unless told otherwise."""
    group: str = "cg:workers"
    results: str = "stream:result"
    dead_letters: str = "stream:dlq"
    max_retries: Retries = 3
    """Also the variable MAX_RETRIES."""
    retry_delays_s: tuple[Time, ...] = (60.0, 300.0, 900.0)
    results_days: Days | None = 7.0
    """Results that are older are removed from their stream; null: never."""
    dead_letters_days: Days | None = 30.0
    """The same for copies of dead letters; the store keeps its own."""
    heartbeat_interval_s: Span = 30.0
    """How often a broker with leases hears that a task is still worked on. Also the variable
    HEARTBEAT_INTERVAL_S."""
    visibility_timeout_s: Span | None = None
    """On Redis, how long an entry may stay without a sign of life before another worker takes it.
    Null: the broker's own default. Also the variable VISIBILITY_TIMEOUT_S; a value in the broker's
    URL wins."""

    def complete(self, name: str, queue: Queue) -> Queue:
        """The queue with everything said that it left open, but what `retry` says for all."""
        codec = queue.codec or (TASK if name == self.stream else "standard")
        if codec != TASK:
            return _with(
                queue,
                codec=codec,
                group="ackbone",
                ordered=True,
                dedup_window_s=3600.0,
            )
        waits = queue.waits_s is None and queue.base_delay_s is None
        return _with(
            queue,
            codec=codec,
            group=self.group,
            ordered=False,
            dedup_window_s=30 * DAY_S,
            results=self.results,
            dead_letters=self.dead_letters,
            max_retries=self.max_retries,
            waits_s=self.retry_delays_s if waits else None,
        )


def _with(queue: Queue, codec: str, **defaults: object) -> Queue:
    left_open = {name: value for name, value in defaults.items() if getattr(queue, name) is None}
    return msgspec.structs.replace(queue, codec=codec, **left_open)
