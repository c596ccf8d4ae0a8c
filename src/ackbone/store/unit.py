"""The unit of work: one transaction, and what it tells others once it is committed.

A store operation is written once, as a coroutine over `Tx` and `Change`. Each dialect brings its
own `Tx`. On SQLite it never suspends, so the writer thread runs the coroutine to its end in one
step (`run_now`); on PostgreSQL it waits for the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from ackbone.core.events import Entry
from ackbone.core.store import Send

if TYPE_CHECKING:
    from .letters import Letter
    from .statements import Statements

T = TypeVar("T")
Row = tuple[Any, ...]
Identity = tuple[str, str, str]
"""tenant_id, subscription, message_id"""
Key = tuple[str, str, str]
"""tenant_id, subscription, idempotency key"""
Lane = tuple[str, str, str]
"""tenant_id, subscription, ordering key"""

NOTHING_EXPIRES = 0
"""A moment before all others."""
WORK, OUTGOING = "w", "o"
"""Topics that processes wait for: messages to run; replies and follow-ups to carry out."""


class Change(msgspec.Struct):
    """What one attempt of an operation does beside its rows."""

    entries: list[Entry] = msgspec.field(default_factory=list)
    """Events for the ledger, in order."""
    keys: set[Key] = msgspec.field(default_factory=set)
    """Keys that were freed or are waited for."""
    lanes: set[Lane] = msgspec.field(default_factory=set)
    """Conversations whose first message may have ended."""
    topics: set[str] = msgspec.field(default_factory=set)
    """Whom to wake after the commit."""
    sends: list[Send] = msgspec.field(default_factory=list)
    """Messages to publish: into the queue where it is in the same file, else by the outbox."""
    told: set[Identity] = msgspec.field(default_factory=set)
    """Tasks whose end is published by somebody else."""
    again: set[Identity] = msgspec.field(default_factory=set)
    """Successes whose broker copy came back: their notice may be missing."""
    durable: bool = False
    """The commit must be synced, even if the operation was started without that."""

    def let_go(self, tenant_id: str, sub: str, key: str | None, lane: str | None) -> None:
        """A message that ended holds neither its key nor its conversation."""
        if key is not None:
            self.keys.add((tenant_id, sub, key))
        if lane is not None:
            self.lanes.add((tenant_id, sub, lane))


class Tx(Protocol):
    """A transaction in progress.

    Values are the same for every dialect, as `ackbone.store.statements` says.
    """

    sql: Statements
    letters: dict[str, Letter]
    """Dead letters that this transaction writes, by their ids."""
    repeated: bool
    """An earlier attempt of this call may have been committed, its answer lost."""

    async def rows(self, statement: str, *values: Any) -> list[Row]:
        """Run a statement and return its rows."""
        ...

    async def send(self, statement: str, *values: Any) -> None:
        """Run a statement whose answer nobody needs."""
        ...

    def before_end(self, statement: str, *values: Any) -> None:
        """Run a statement before the commit; it may have to wait for a lock on its rows."""
        ...

    def at_end(self, statement: str, *values: Any) -> None:
        """Run a statement with the commit: it writes new rows, or rows that are locked already."""
        ...

    async def moment(self) -> int:
        """The time of this transaction (µs)."""
        ...

    async def hold_deliveries(self) -> int:
        """Wait until nobody else changes where deliveries are; returns the time after that."""
        ...


Operation = Callable[[Tx, Change], Awaitable[T]]


class UnitOfWork(Protocol):
    """The store as its operations use it."""

    @property
    def expiry_paused(self) -> bool:
        """True while a jump of the clock makes times to live doubtful: nothing expires."""
        ...

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """One statement by itself."""
        ...

    async def write(self, op: Operation[T], *, worker_id: int, durable: bool = True) -> T:
        """One transaction. At its commit, in this order: notices of ended tasks, deliveries to
        subscribers, events of the ledger; after it, whoever waits is woken."""
        ...

    async def write_once(self, op: Operation[T], *, worker_id: int) -> T:
        """As `write`, for an operation that would fail if it were repeated after it succeeded."""
        ...


def run_now(work: Awaitable[T]) -> T:
    """Run an operation that never waits for anything."""
    try:
        next(work.__await__())
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a store operation waited for something inside a SQLite transaction")
