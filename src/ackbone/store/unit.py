"""The unit of work: one transaction, and what follows from it at its commit.

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
    from .delivery_rows import DeliveryRows
    from .outcomes import Letter
    from .sql import Statements
    from .tables import GrantedRuns, KeyRows, LaneRows, QuotaRows, TaskRows

T = TypeVar("T")
Row = tuple[Any, ...]
Rows = Callable[..., Awaitable[list[Row]]]
"""Runs a statement with its values, inside a transaction or by itself."""
Identity = tuple[str, str, str]
"""tenant_id, subscription, message_id"""
Key = tuple[str, str, str]
"""tenant_id, subscription, idempotency key"""
Lane = tuple[str, str, str]
"""tenant_id, subscription, ordering key"""

NOTHING_EXPIRES = 0
"""A time before all others."""
WORK, OUTGOING = "w", "o"
"""Topics that processes wait for: messages to run; replies and follow-ups to carry out."""


class Change(msgspec.Struct):
    """The consequences of one attempt of an operation. `ackbone.store.commit` carries them out."""

    entries: list[Entry] = msgspec.field(default_factory=list)
    """Events for the ledger, in order."""
    keys: set[Key] = msgspec.field(default_factory=set)
    """Keys that became free, or that a message began to wait for."""
    lanes: set[Lane] = msgspec.field(default_factory=set)
    """Conversations whose first message may have ended."""
    topics: set[str] = msgspec.field(default_factory=set)
    """Topics of the processes to wake after the commit."""
    deliveries: list[Row] = msgspec.field(default_factory=list)
    """Deliveries to write, as rows of `store.delivery_rows`. A row whose id exists is skipped."""
    sends: list[Send] = msgspec.field(default_factory=list)
    """Messages to publish: into the queue where it is in the same file, else by the outbox."""
    told: set[Identity] = msgspec.field(default_factory=set)
    """Tasks whose result is published together with the broker ack, so they need no notice."""
    again: set[Identity] = msgspec.field(default_factory=set)
    """Successes whose broker copy came back: their notice may be missing."""
    durable: bool = False
    """True if the commit must be synced although the operation was started without that."""

    def let_go(self, tenant_id: str, sub: str, key: str | None, lane: str | None) -> None:
        """Free the key and the conversation of a message that ended."""
        if key is not None:
            self.keys.add((tenant_id, sub, key))
        if lane is not None:
            self.lanes.add((tenant_id, sub, lane))


class Tx(Protocol):
    """A transaction in progress.

    Values are the same for every dialect, as `ackbone.store.sql` says.
    """

    sql: Statements
    letters: dict[str, Letter]
    """Dead letters that this transaction writes, by their ids."""
    repeated: bool
    """An earlier attempt of this call may have been committed, its answer lost."""
    if_unknown: Callable[[], None] | None
    """Called if it is not known whether this transaction was committed."""
    exclusive: bool
    """True if no other transaction is committed before this one ends."""

    @property
    def now_us(self) -> int | None:
        """The time of this transaction (µs) if this process knows it; None: the database does."""

    @property
    def tasks(self) -> TaskRows: ...

    @property
    def keys(self) -> KeyRows: ...

    @property
    def lanes(self) -> LaneRows: ...

    @property
    def quotas(self) -> QuotaRows: ...

    @property
    def granted(self) -> GrantedRuns | None:
        """None where every commit has an answer."""

    @property
    def deliveries(self) -> DeliveryRows:
        """Writes of many deliveries, and of messages that leave."""

    async def rows(self, statement: str, *values: Any) -> list[Row]:
        """Run a statement and return its rows."""

    async def send(self, statement: str, *values: Any) -> None:
        """Run a statement whose answer is not needed."""

    def before_end(self, statement: str, *values: Any) -> None:
        """Run a statement before the commit; it may have to wait for a lock on its rows."""

    def at_end(self, statement: str, *values: Any) -> None:
        """Run a statement with the commit: it writes new rows, or rows that are locked already."""

    async def moment(self) -> int:
        """The time of this transaction (µs)."""

    async def look_at_clock(self) -> None:
        """Move `moment` on to now: this transaction has seen what others committed since it was
        begun, and its events must not seem to be older."""

    async def require_alive(self, worker_id: int, *, or_leaving: bool = False) -> None:
        """Raise StoreUnavailable if this worker was declared dead or left, or if it is leaving
        and that is not allowed.

        Call it after the first statement of a claim: PostgreSQL answers both at once.
        """

    async def hold_deliveries(self) -> int:
        """Wait until no other transaction moves deliveries, and return the time after that."""


Operation = Callable[[Tx, Change], Awaitable[T]]
