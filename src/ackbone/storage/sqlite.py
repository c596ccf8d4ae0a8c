"""The truth in a SQLite file, which the broker's queue may share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ackbone.core.broker import Broker, Notices, Transactional
from ackbone.core.checks import Check, Finding, ok, refused
from ackbone.core.clock import Clock
from ackbone.core.errors import AckboneError, NotFound, SchemaMismatch
from ackbone.core.store import Copies, Store
from ackbone.core.subscribers import Subscribers
from ackbone.store import migrate
from ackbone.store.keep import Keep
from ackbone.store.sqlite.store import SqliteStore

from . import Acting, Looking, Migration, Stepper

if TYPE_CHECKING:
    from ackbone.config import Config
    from ackbone.core.approvals import Clerk
    from ackbone.core.delivery import Deliveries
    from ackbone.core.meter import MetricRows
    from ackbone.store.ledger_report import LedgerReport, Progress
    from ackbone.store.outbox import OutboxRows
    from ackbone.store.postgres.wall import Admission

log = logging.getLogger("ackbone.store")


class SqliteStorage:
    """`Storage` on the file that the configuration names."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = config.store_file
        self.place = str(self._path)

    # -- the schema -------------------------------------------------------------------------------

    def ensure(self) -> None:
        if not self._path.exists() and (hint := _older_name(self._path)):
            log.warning("%s", hint)
        for path in self._paths():
            migrate.ensure_schema(path)

    def require(self) -> None:
        path = self._path
        if not path.exists():
            raise NotFound(
                f"there is no database yet ({path}). 'ackbone dev' or 'ackbone send' makes one; "
                f"ACKBONE_HOME and --config say where to look. {_older_name(path)}".rstrip()
            )
        if migrate.is_behind(path):
            revision = migrate.current_revision(path) or "none"
            raise SchemaMismatch(
                f"{path} has schema revision {revision}, this ackbone needs {migrate.HEAD}. "
                "Run 'ackbone migrate'"
            )

    def migrate(self, *, check: bool) -> Sequence[Migration]:
        found = []
        for path in self._paths():
            before, behind = migrate.current_revision(path), migrate.is_behind(path)
            if behind and not check:
                migrate.ensure_schema(path)
            found.append(Migration(str(path), before, behind))
        return found

    def admit(self, *, worker: str | None, api: str | None) -> Sequence[Admission]:
        raise NotFound(
            f"this store is a file ({self.place}), which knows no roles: whoever may read it sees "
            "all tenants. Roles are PostgreSQL's"
        )

    def _paths(self) -> Sequence[Path]:
        return sqlite_paths(self._path, self._config)

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
        one_file = self._config.broker_file == self._path
        queue: object = broker
        return SqliteStore(
            self._path,
            queue=queue if one_file and isinstance(queue, Transactional) else None,
            clock=clock,
            isolates=isolates,
            notices=notices,
            subscribers=subscribers,
        )

    def outbox(self, store: Store) -> OutboxRows:
        from ackbone.store.sqlite.outbox import SqliteOutboxRows

        return SqliteOutboxRows(_ours(store))

    def deliveries(self, store: Store) -> Deliveries:
        from ackbone.store.sqlite.deliveries import SqliteDeliveries

        return SqliteDeliveries(_ours(store))

    def metric_rows(self, store: Store) -> MetricRows:
        from ackbone.store.sqlite.metric_rows import SqliteMetricRows

        return SqliteMetricRows(_ours(store))

    def anchors(self, store: Store, *, key: bytes, file: Path) -> Stepper:
        from ackbone.store.sqlite.anchors import Anchors

        return Anchors(_ours(store), key=key, anchor_file=file)

    def pruner(self, store: Store, *, key: bytes, keep_days: float) -> Stepper:
        from ackbone.store.sqlite.prune import Pruner

        return Pruner(_ours(store), key=key, keep_days=keep_days)

    def retention(self, store: Store, keep: Keep) -> Stepper:
        from ackbone.store.sqlite.retention import Retention

        return Retention(_ours(store), keep)

    def clerk(self, store: Store) -> Clerk:
        from ackbone.store.sqlite.clerk import SqliteClerk

        return SqliteClerk(_ours(store))

    def copies(self, store: Store) -> Copies:
        from ackbone.store.sqlite.copies import SqliteCopies

        return SqliteCopies(_ours(store))

    def upkeep(self, store: Store) -> Sequence[Stepper]:
        return ()

    # -- people -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Looking]:
        from ackbone.sqlite.file import close_file, open_file
        from ackbone.store.sqlite.records import SqliteRecords

        self.require()
        queue_path = self._config.broker_file
        apart = queue_path is not None and queue_path != self._path and queue_path.exists()
        file = await asyncio.to_thread(open_file, self._path)
        try:
            queue = await asyncio.to_thread(open_file, queue_path) if apart and queue_path else None
            try:
                yield SqliteRecords(file, queue=queue, lease_s=self._config.worker.lease_s)
            finally:
                if queue is not None:
                    await asyncio.to_thread(close_file, queue)
        finally:
            await asyncio.to_thread(close_file, file)

    def records(self, store: Store, broker: Broker | None = None) -> Looking:
        from ackbone.brokers.sqlite import SqliteBroker
        from ackbone.store.sqlite.records import SqliteRecords

        queue = broker.file if isinstance(broker, SqliteBroker) else None
        lease_s = self._config.worker.lease_s
        return SqliteRecords(_ours(store).file, queue=queue, lease_s=lease_s)

    def operations(
        self, store: Store, broker: Broker | None, *, by: str
    ) -> AbstractAsyncContextManager[Acting]:
        from ackbone.store.operations import StoreOperations

        return StoreOperations(_ours(store), by=by, beat_every_s=self._config.worker.lease_s / 4)

    def verify(self, key: bytes, anchor_file: Path, progress: Progress | None) -> LedgerReport:
        from ackbone.store.sqlite.verify import verify_ledger

        return verify_ledger(self._path, key, anchor_file, progress)

    def examine(self, *, deep: bool) -> Sequence[Check]:
        from ackbone.admin import doctor
        from ackbone.core.clock import SystemClock
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


def sqlite_paths(store: Path | None, config: Config) -> Sequence[Path]:
    """The files that have a schema: the store's, and the broker's."""
    return list(dict.fromkeys(p for p in (store, config.broker_file) if p is not None))


def _ours(store: Store) -> SqliteStore:
    if not isinstance(store, SqliteStore):
        raise TypeError(f"a SQLite store is needed, not {type(store).__name__}")
    return store
