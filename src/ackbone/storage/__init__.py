"""Where a configuration keeps its truth: one composition for each database.

Everybody who needs more of the store than the engine does (relays, commands, the orchestrator) gets
it here, as a port; the classes behind it are named in the two modules beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ackbone.core.approvals import Answers, ApprovalRecords, Clerk
from ackbone.core.broker import Broker, Notices
from ackbone.core.checks import Check
from ackbone.core.clock import Clock
from ackbone.core.delivery import Deliveries
from ackbone.core.delivery_desk import DeliveryActs, DeliveryRecords
from ackbone.core.endings import Endings
from ackbone.core.meter import MetricRows
from ackbone.core.quota import QuotaRecords
from ackbone.core.records import Operations, Records
from ackbone.core.store import Copies, Store, Worker
from ackbone.core.subscribers import Subscribers

if TYPE_CHECKING:
    from ackbone.config import Config
    from ackbone.store.keep import Keep
    from ackbone.store.ledger_report import LedgerReport, Progress
    from ackbone.store.outbox import OutboxRows
    from ackbone.store.postgres.wall import Admission


class Looking(Records, ApprovalRecords, QuotaRecords, DeliveryRecords, Protocol):
    """All that an operator may look at."""


class Acting(Operations, Answers, DeliveryActs, Protocol):
    """All that an operator may do."""


class Stepper(Protocol):
    """One piece of upkeep."""

    async def step(self, worker: Worker) -> Any: ...


class Migration(NamedTuple):
    """One database, and where its schema stands or went."""

    place: str
    before: str | None
    behind: bool
    """There was, or is, something to do."""


class Storage(Protocol):
    """One kind of database."""

    place: str
    """For people; without secrets."""

    # -- the schema -------------------------------------------------------------------------------

    def ensure(self) -> None:
        """Make what is not there yet. Raises SchemaMismatch for what it may not or cannot mend."""
        ...

    def require(self) -> None:
        """Raises NotFound or SchemaMismatch unless it is there, and readable for this version."""
        ...

    def migrate(self, *, check: bool) -> Sequence[Migration]:
        """Bring everything to the newest schema; `check`: only look."""
        ...

    def admit(self, *, worker: str | None, api: str | None) -> Sequence[Admission]:
        """Give a role what workers need, and another what pages and approvals of one tenant at a
        time need, making roles that are missing. Raises NotFound where there are no roles."""
        ...

    # -- the store --------------------------------------------------------------------------------

    def make_store(
        self,
        broker: Broker,
        *,
        clock: Clock,
        isolates: bool,
        notices: Callable[[str], Notices | None] | None,
        subscribers: Subscribers | None = None,
    ) -> Store:
        """Not open yet."""
        ...

    def outbox(self, store: Store) -> OutboxRows: ...

    def deliveries(self, store: Store) -> Deliveries: ...

    def metric_rows(self, store: Store) -> MetricRows: ...

    def anchors(self, store: Store, *, key: bytes, file: Path) -> Stepper: ...

    def pruner(self, store: Store, *, key: bytes, keep_days: float) -> Stepper: ...

    def retention(self, store: Store, keep: Keep) -> Stepper: ...

    def clerk(self, store: Store) -> Clerk: ...

    def copies(self, store: Store) -> Copies: ...

    def upkeep(self, store: Store) -> Sequence[Stepper]:
        """What this kind of database needs beside the others."""
        ...

    # -- people -----------------------------------------------------------------------------------

    def reading(self) -> AbstractAsyncContextManager[Looking]:
        """The records, to look at. Makes nothing and migrates nothing."""
        ...

    def records(self, store: Store, broker: Broker | None = None) -> Looking:
        """The records of a store that is open."""
        ...

    def operations(
        self, store: Store, broker: Broker | None, *, by: str
    ) -> AbstractAsyncContextManager[Acting]:
        """The operations of a store that is open, under a worker number of their own."""
        ...

    def verify(self, key: bytes, anchor_file: Path, progress: Progress | None) -> LedgerReport: ...

    def examine(self, *, deep: bool) -> Sequence[Check]:
        """What is wrong with the database, or soon will be; ends with the first refusal."""
        ...


def storage_of(config: Config) -> Storage:
    """The one that `store` names. Raises ConfigError if its driver is missing."""
    if config.store_kind == "postgresql":
        from ackbone.core.errors import ConfigError

        try:
            from ackbone.storage.postgres import PostgresStorage
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "psycopg":
                raise
            missing = "store: postgresql: its driver is missing; write: pip install "
            raise ConfigError([f"{missing}'ackbone[postgres]'"]) from None
        return PostgresStorage(config)
    from ackbone.storage.sqlite import SqliteStorage

    return SqliteStorage(config)


def endings_of(store: Store) -> Endings:
    """How its messages ended. The store is open."""
    from ackbone.store.sqlite.store import SqliteStore

    if isinstance(store, SqliteStore):
        from ackbone.store.sqlite.endings import SqliteEndings

        return SqliteEndings(store)
    from ackbone.store.postgres.endings import PostgresEndings
    from ackbone.store.postgres.store import PostgresStore

    if isinstance(store, PostgresStore):
        return PostgresEndings(store)
    raise TypeError(f"a store of ackbone is needed, not {type(store).__name__}")
