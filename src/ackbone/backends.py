"""The database of a configuration: which classes belong together on SQLite and on PostgreSQL.

Commands, relays and the orchestrator need more of the store than the engine does. They get it from
a `Storage`, as ports. Drivers are imported when it is made: a command that needs no database
starts without them, and psycopg is an optional extra.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ackbone.core.approvals import Answers, ApprovalRecords, GovernanceUpkeep
from ackbone.core.broker import Broker, Transactional
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import AckboneError, ConfigError, NotFound, StoreUnavailable
from ackbone.core.findings import Check, Finding, ok, refused
from ackbone.core.meter import MetricRows
from ackbone.core.notices import Notices
from ackbone.core.outbound.delivery import Deliveries
from ackbone.core.outbound.delivery_records import DeliveryActs, DeliveryRecords
from ackbone.core.outbound.subscribers import Subscribers
from ackbone.core.outcome import Endings
from ackbone.core.quota import QuotaRecords
from ackbone.core.records import Operations, Records
from ackbone.core.store import Copies, Store, Worker

if TYPE_CHECKING:
    from ackbone.composition.brokers import Brokers
    from ackbone.config import Config
    from ackbone.store.anchors import ChainEnds
    from ackbone.store.ledger_verifier import LedgerReport, Progress
    from ackbone.store.outbox import Outbox
    from ackbone.store.postgres.tenant_wall import Admission
    from ackbone.store.retention import Keep, OldRows

log = logging.getLogger("ackbone.store")


class Looking(Records, ApprovalRecords, QuotaRecords, DeliveryRecords, Protocol):
    """Everything that an operator may look at."""


class Acting(Operations, Answers, DeliveryActs, Protocol):
    """Everything that an operator may do."""


class Stepper(Protocol):
    """One piece of upkeep."""

    async def step(self, worker: Worker) -> Any: ...


class Migration(NamedTuple):
    """One database and its schema."""

    place: str
    before: str | None
    """The revision that it had."""
    behind: bool
    """That revision is, or was, not the newest."""


class Roles(NamedTuple):
    """What one dialect brings for each role. The callables take the open store first."""

    store: type[Any]
    deliveries: Callable[[Any], Deliveries]
    old_rows: Callable[[Any], OldRows]
    chain_ends: Callable[[Any], ChainEnds]
    pruner: Callable[..., Stepper]
    upkeep: Callable[[Any], Stepper]
    """Work that only this dialect needs."""
    verify: Callable[[Any, bytes, Path, Progress | None], LedgerReport]
    """Takes the place of the database instead of a store."""


def _sqlite() -> Roles:
    from ackbone.store.sqlite import deliveries, prune, seals, store, verify

    return Roles(
        store=store.SqliteStore,
        deliveries=deliveries.SqliteDeliveries,
        old_rows=prune.SqliteOldRows,
        chain_ends=seals.SqliteChainEnds,
        pruner=prune.Pruner,
        upkeep=prune.WorkerFiles,
        verify=verify.verify_ledger,
    )


def _postgres() -> Roles:
    from ackbone.store.postgres import deliveries, partitions, prune, seals, store, verify

    return Roles(
        store=store.PostgresStore,
        deliveries=deliveries.PostgresDeliveries,
        old_rows=prune.PostgresOldRows,
        chain_ends=seals.PostgresChainEnds,
        pruner=prune.Pruner,
        upkeep=partitions.PartitionMaker,
        verify=verify.verify_ledger,
    )


class Storage(ABC):
    """One database: its schema, its store, and what belongs to the store."""

    place: str
    """For people; without secrets."""

    def __init__(self, config: Config, roles: Roles, where: Path | str) -> None:
        self._config = config
        self._roles = roles
        self._where = where

    # -- the schema -------------------------------------------------------------------------------

    @abstractmethod
    def ensure(self) -> None:
        """Make the tables that do not exist yet. Raises SchemaMismatch if that is not possible."""

    @abstractmethod
    def require(self) -> None:
        """Raises NotFound or SchemaMismatch unless this version can read the tables."""

    @abstractmethod
    def migrate(self, *, check: bool) -> Sequence[Migration]:
        """Bring everything to the newest schema. With `check`, only look."""

    @abstractmethod
    def admit(self, *, worker: str | None, api: str | None) -> Sequence[Admission]:
        """Give a role the rights of workers, and another the rights of pages and approvals of one
        tenant at a time. Roles that are missing are made. Raises NotFound where there are none."""

    # -- the store and its upkeep -----------------------------------------------------------------

    def make_store(
        self,
        brokers: Brokers | None,
        *,
        clock: Clock,
        isolates: bool,
        notices: Callable[[str], Notices | None] | None,
        subscribers: Subscribers | None = None,
    ) -> Store:
        """A store that is not open yet. Without `brokers` all queues are elsewhere."""
        made: Store = self._roles.store(
            self._where,
            clock=clock,
            isolates=isolates,
            notices=notices,
            subscribers=subscribers,
            **self._options(brokers),
        )
        return made

    @abstractmethod
    def _options(self, brokers: Brokers | None) -> dict[str, Any]:
        """Arguments that only this dialect's store takes."""

    def outbox(
        self,
        store: Store,
        broker_of: Callable[[str], Broker],
        *,
        codec_of: Callable[[str], str],
        name_of: Callable[[str], str],
    ) -> Outbox:
        from ackbone.store.outbox import Outbox

        return Outbox(self._own(store), broker_of, codec_of=codec_of, name_of=name_of)

    def deliveries(self, store: Store) -> Deliveries:
        return self._roles.deliveries(self._own(store))

    def metric_rows(self, store: Store) -> MetricRows:
        from ackbone.store.upkeep import StoreMetricRows

        return StoreMetricRows(self._own(store))

    def governance(self, store: Store) -> GovernanceUpkeep:
        from ackbone.store.upkeep import StoreGovernance

        return StoreGovernance(self._own(store))

    def copies(self, store: Store) -> Copies:
        from ackbone.store.upkeep import StoreCopies

        return StoreCopies(self._own(store))

    def retention(self, store: Store, keep: Keep) -> Stepper:
        from ackbone.store.retention import Retention

        own = self._own(store)
        return Retention(own, self._roles.old_rows(own), keep)

    def anchors(self, store: Store, *, key: bytes, file: Path) -> Stepper:
        from ackbone.store.anchors import Anchors

        own = self._own(store)
        return Anchors(own, self._roles.chain_ends(own), key=key, anchor_file=file)

    def pruner(self, store: Store, *, key: bytes, keep_days: float) -> Stepper:
        return self._roles.pruner(self._own(store), key=key, keep_days=keep_days)

    def upkeep(self, store: Store) -> Stepper:
        """The work that only this kind of database needs."""
        return self._roles.upkeep(self._own(store))

    def _own(self, store: Store) -> Any:
        if not isinstance(store, self._roles.store):
            expected = self._roles.store.__name__
            raise TypeError(f"a {expected} is needed, not a {type(store).__name__}")
        return store

    # -- operators --------------------------------------------------------------------------------

    @abstractmethod
    def reading(self) -> AbstractAsyncContextManager[Looking]:
        """The records of a store that nobody has opened. Makes nothing and migrates nothing."""

    @abstractmethod
    def records(self, store: Store, brokers: Brokers | None = None) -> Looking:
        """The records of an open store."""

    def operations(self, store: Store, *, by: str) -> AbstractAsyncContextManager[Acting]:
        """The operations of an open store, under a worker number of their own."""
        from ackbone.store.operations import StoreOperations

        beat_every_s = self._config.worker.lease_s / 4
        return StoreOperations(self._own(store), by=by, beat_every_s=beat_every_s)

    def verify(self, key: bytes, anchor_file: Path, progress: Progress | None) -> LedgerReport:
        """Check the ledger against its signatures."""
        return self._roles.verify(self._where, key, anchor_file, progress)

    @abstractmethod
    def examine(self, *, deep: bool) -> Sequence[Check]:
        """What is wrong with the database, or soon will be. Ends with the first refusal."""


class SqliteStorage(Storage):
    """A SQLite file, which the broker's queue may share."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, _sqlite(), config.store_file)
        self._path = config.store_file
        self.place = str(self._path)

    def ensure(self) -> None:
        if not self._path.exists() and (hint := _older_name(self._path)):
            log.warning("%s", hint)
        _migrate_files(self._files(), check=False)

    def require(self) -> None:
        from ackbone.store.sqlite import migrate

        if not self._path.exists():
            raise NotFound(
                f"there is no database yet ({self._path}). 'ackbone dev' or 'ackbone send' makes "
                "one; ACKBONE_HOME and --config say where to look. "
                f"{_older_name(self._path)}".rstrip()
            )
        migrate.require_current(self._path)

    def migrate(self, *, check: bool) -> Sequence[Migration]:
        return _migrate_files(self._files(), check=check)

    def admit(self, *, worker: str | None, api: str | None) -> Sequence[Admission]:
        raise NotFound(
            f"this store is a file ({self.place}), and files have no roles: anybody who may read "
            "it sees all tenants. Roles need PostgreSQL"
        )

    def _files(self) -> Sequence[Path]:
        return list(dict.fromkeys([self._path, *self._config.broker_files]))

    def _options(self, brokers: Brokers | None) -> dict[str, Any]:
        found = None if brokers is None else brokers.on_file(self._path)
        queue: object = found
        if brokers is None or not isinstance(queue, Transactional):
            return {}
        return {"queue": queue, "is_local": lambda name: brokers.of(name) is found}

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Looking]:
        from ackbone.sqlitefile.file import close_file, open_file
        from ackbone.store.sqlite.records import SqliteRecords

        self.require()
        paths = [path for path in self._files() if path.exists()]
        files = []
        try:
            for path in paths:
                files.append(await asyncio.to_thread(open_file, path))
            queues = files[1:] if self._path not in self._config.broker_files else files
            yield SqliteRecords(files[0], queues=queues, lease_s=self._config.worker.lease_s)
        finally:
            for file in files:
                await asyncio.to_thread(close_file, file)

    def records(self, store: Store, brokers: Brokers | None = None) -> Looking:
        from ackbone.brokers.sqlite import SqliteBroker
        from ackbone.store.sqlite.records import SqliteRecords

        made = () if brokers is None else brokers.by_name.values()
        queues = {each.file.path: each.file for each in made if isinstance(each, SqliteBroker)}
        lease_s = self._config.worker.lease_s
        file = self._own(store).file
        return SqliteRecords(file, queues=list(queues.values()) or [file], lease_s=lease_s)

    def examine(self, *, deep: bool) -> Sequence[Check]:
        from ackbone.admin import doctor
        from ackbone.store.sqlite import checks

        path = self._path
        found = [
            checks.check_version(),
            checks.check_file_system(path),
            *doctor.check_home(self._config.home),
            doctor.check_space(path.parent),
        ]
        if not path.exists():
            made = f"{path} does not exist yet; it is made at the first start"
            return [*found, ok("database", made)]
        try:
            found.append(checks.check_schema(path))
            if found[-1].finding is Finding.OK:
                found.append(checks.check_witness(path))
                found += [checks.check_turn(path), checks.check_log(path)]
                if deep:
                    found += [checks.check_integrity(path), checks.check_bodies(path)]
                last = checks.last_event_us(path)
                found.append(doctor.check_clock(SystemClock().now_us(), last))
        except AckboneError as error:
            found.append(refused("database", str(error)))
        return found


class PostgresStorage(Storage):
    """A PostgreSQL database, for workers on several machines, which the broker's queue may share. A
    SQLite broker keeps its file."""

    def __init__(self, config: Config) -> None:
        from ackbone.pgserver.address import Address

        super().__init__(config, _postgres(), config.store)

        self._url = config.store
        self.place = Address.from_url(self._url).shown

    def ensure(self) -> None:
        from ackbone.store.postgres import migrate

        migrate.ensure_schema(self._url)
        _migrate_files(self._files(), check=False)

    def require(self) -> None:
        from ackbone.store.postgres import migrate

        if migrate.current_revision(self._url) is None:
            raise NotFound(
                f"{self.place} has no ackbone tables yet. 'ackbone migrate' makes them, and so "
                "does the first worker; --config says where to look"
            )
        migrate.require_current(self._url)

    def migrate(self, *, check: bool) -> Sequence[Migration]:
        from ackbone.store.postgres import migrate

        before, behind = migrate.current_revision(self._url), migrate.is_behind(self._url)
        if behind and not check:
            migrate.upgrade(self._url)
        elif not check:
            migrate.tend(self._url)
        files = _migrate_files(self._files(), check=check)
        return [Migration(self.place, before, behind), *files]

    def admit(self, *, worker: str | None, api: str | None) -> Sequence[Admission]:
        from ackbone.store.postgres import migrate

        return migrate.admit(self._url, worker=worker, api=api)

    def _files(self) -> Sequence[Path]:
        return self._config.broker_files

    def _options(self, brokers: Brokers | None) -> dict[str, Any]:
        options: dict[str, Any] = {"lease_s": self._config.worker.lease_s}
        here = [] if brokers is None else brokers.at(self._url)
        if brokers is not None and here:
            options |= {"queue": here[0], "is_local": lambda name: brokers.of(name) in here}
        return options

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Looking]:
        self.require()
        store = self._roles.store(self._url)
        await store.open()
        try:
            yield self.records(store)
        finally:
            await store.close()

    def records(self, store: Store, brokers: Brokers | None = None) -> Looking:
        from ackbone.store.postgres.records import PostgresRecords

        return PostgresRecords(self._own(store))

    def examine(self, *, deep: bool) -> Sequence[Check]:
        from ackbone.admin import doctor
        from ackbone.store.postgres import checks

        found = [*doctor.check_home(self._config.home)]
        try:
            return [*found, *checks.examine(self._url, deep=deep)]
        except StoreUnavailable as error:
            return [*found, refused("database", str(error), error.hint)]
        except AckboneError as error:
            return [*found, refused("database", str(error))]


def storage_of(config: Config) -> Storage:
    """The database that `store` names. Raises ConfigError if its driver is missing."""
    if config.store_kind != "postgresql":
        return SqliteStorage(config)
    try:
        return PostgresStorage(config)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ackbone":
            raise
        from ackbone.core.errors import install_extra

        how = install_extra("postgres")
        raise ConfigError([f"store: postgresql: its driver is missing; {how}"]) from None


def endings_of(store: Store) -> Endings:
    """How the messages of an open store ended."""
    from ackbone.store.base import BaseStore
    from ackbone.store.upkeep import StoreEndings

    if isinstance(store, BaseStore):
        return StoreEndings(store)
    raise TypeError(f"a store of ackbone is needed, not {type(store).__name__}")


def _migrate_files(files: Sequence[Path], *, check: bool) -> list[Migration]:
    from ackbone.store.sqlite import migrate

    found = []
    for path in files:
        before, behind = migrate.current_revision(path), migrate.is_behind(path)
        if behind and not check:
            migrate.ensure_schema(path)
        found.append(Migration(str(path), before, behind))
    return found


def _older_name(path: Path) -> str:
    """What to do with a database of the time when this project was called holdfast, if any."""
    old = path.parent.with_name(".holdfast") / "holdfast.db"
    if path.parent.name != ".ackbone" or not old.exists():
        return ""
    return (
        f"{old} was made when ackbone was called holdfast, and is not read. To keep its messages, "
        f"stop all workers, rename its folder to {path.parent} and each file holdfast.db* in it to "
        "ackbone.db*"
    )
