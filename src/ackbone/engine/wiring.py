"""The values that a worker is made of: its connections, its handlers, its limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from ackbone.core.breaker import BreakerPolicy
from ackbone.core.broker import Broker
from ackbone.core.clock import Clock
from ackbone.core.guard import Guard
from ackbone.core.meter import Meter
from ackbone.core.secret import mask_line
from ackbone.core.store import Claims, Company, Effects, RunWrites

from .context import Context, MakeSend
from .handlers import Handler, Handlers
from .tracebacks import Mask

CallNext = Callable[[Context], Awaitable[Any]]
Middleware = Callable[[Context, CallNext], Awaitable[Any]]
"""Wraps the handler's call. The first one that was registered is the outermost."""


class WorkerStore(Claims, Effects, RunWrites, Protocol):
    """The parts of the store that a worker uses."""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The connections of a worker."""

    store: WorkerStore
    broker_of: Callable[[str], Broker | None]
    """Returns the broker of a queue. None: the queue is in the store's own file."""
    clock: Clock
    meter: Meter | None = None
    results_on_ack: Mapping[str, str] = {}
    """The queues of results that the broker writes together with the acknowledgement of a success
    (`TaskBroker`), by subscription."""


class Isolated(Protocol):
    """Runs a handler in a child process that can be killed."""

    async def call(self, handler: Handler, context: Context) -> Any: ...

    async def close(self) -> None: ...


class Handling(msgspec.Struct, frozen=True, kw_only=True):
    """The handlers of a worker, and everything that is done around their calls."""

    handlers: Handlers
    make_send: MakeSend
    """Builds the follow-ups that handlers send."""
    guard: Guard | None = None
    guard_timeout_s: float = 10.0
    middleware: tuple[Middleware, ...] = ()
    breaker: BreakerPolicy = BreakerPolicy()
    isolated: Isolated | None = None
    threads: int = 100
    """Threads for plain handlers."""
    mask: Mask = mask_line
    """Removes secrets from errors and tracebacks before they are stored."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker behaves."""

    name: str = ""
    slots: int = 100
    """Messages of one subscription that run at the same time."""
    own_slots: Mapping[str, int] = {}
    """The same, for subscriptions that differ."""
    paused: frozenset[str] = frozenset()
    """Subscriptions that the configuration pauses. Operators cannot resume these."""
    lease_s: float = 10.0
    reap_every_s: float = 0.5
    crash_budget: int = 2
    shutdown_timeout_s: float = 30.0
    stall_limit_s: float = 60.0
    recycle_grace_s: float = 10.0
    clock_hold_s: float = 300.0
    """How long nothing expires after somebody set the clock."""
    max_message_bytes: int | None = None
    extend_s: float = 30.0
    """The longest time between two signs of life of a running message, for brokers with leases and
    for the ledger of the task protocol."""
    company: Company = Company.ANY
    """Which messages to run. A child process runs suspects, a small group or one at a time over
    all queues. A suspect starts only after the previous one is committed."""
    cautious: bool = False
    """Begin with few slots, because the process before this one crashed."""
    parent: str | None = None
    """The process that started this one, as the store knows it."""

    @property
    def is_child(self) -> bool:
        return self.company is not Company.ANY
