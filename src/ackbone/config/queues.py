"""Settings of queues."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ackbone.core.notices import Notices

YEAR = 31_536_000
Time = Annotated[float, Meta(ge=0, le=YEAR)]
Span = Annotated[float, Meta(gt=0, le=YEAR)]
Days = Annotated[float, Meta(gt=0, le=36_500)]
Retries = Annotated[int, Meta(ge=0, le=1_000_000)]
Factor = Annotated[float, Meta(ge=1, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]
AckPolicy = Literal["ack", "nack", "requeue", "dlq"]

DAY_S = 86_400.0


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Number of retries and waits between them, unless a queue has its own."""

    max_retries: Retries = 3
    """Retries after the first attempt."""
    base_delay_s: Time = 1.0
    max_delay_s: Time = 60.0
    backoff_factor: Factor = 2.0
    waits_s: tuple[Time, ...] = ()
    """A list of waits, instead of growing ones; the last one repeats."""
    jitter: Share = 0.1
    """Up to this share is added to a wait."""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """One queue. Retry settings that are not given here come from `retry`."""

    broker: str | None = None
    """Its name in `brokers`; null: the default one."""
    codec: str = ""
    """Wire form of the messages: standard, json, text, binary or task. Empty: standard, and task
    for the stream of `tasks`."""
    group: str | None = None
    """The consumer group, if the broker has groups; null: ackbone, tasks: `tasks.group`."""
    tenant: str | None = None
    """The tenant of every message; null: each message names its own."""
    ordered: bool | None = None
    """Whether messages with the same ordering key run one after another; null: yes, tasks: no."""
    ack_policy: AckPolicy = "dlq"
    """How the broker's copy is settled when a message finally fails."""
    dedup: bool = True
    """Whether idempotency keys are used."""
    dedup_window_s: Span | None = None
    """How long an idempotency key is remembered; null: an hour, tasks: 30 days."""
    max_retries: Retries | None = None
    base_delay_s: Time | None = None
    max_delay_s: Time | None = None
    backoff_factor: Factor | None = None
    waits_s: tuple[Time, ...] | None = None
    jitter: Share | None = None
    ttl_s: Span | None = None
    """Time to live of messages that have none."""
    timeout_s: Span | None = None
    """Time limit of one run, unless the handler has one."""
    on_parked: Literal["wait", "skip"] = "wait"
    """Whether later messages of a conversation wait for a parked one."""
    results: str | None = None
    """The queue that gets one entry for each message that ends; null: none, tasks: `tasks.results`.
    Empty: none."""
    dead_letters: str | None = None
    """The queue that gets a copy of each dead letter; null: none, tasks: `tasks.dead_letters`.
    Empty: none."""
    broker_dead_letters: str | None = None
    """The queue to which the broker's server moves messages that it gives up. They become dead
    letters of this queue; null: none."""
    paused: bool = False

    @property
    def notices(self) -> Notices | None:
        """The queues that get notices about the ends of messages, or None."""
        if not self.results and not self.dead_letters:
            return None
        return Notices(results=self.results or None, dead_letters=self.dead_letters or None)

    def complete(self, codec: str, **defaults: object) -> Queue:
        """Return the queue with this codec, and with defaults for its open settings."""
        left_open = {name: each for name, each in defaults.items() if getattr(self, name) is None}
        return msgspec.structs.replace(self, codec=codec, **left_open)
