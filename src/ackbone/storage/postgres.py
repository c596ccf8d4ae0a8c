"""The truth in a PostgreSQL database, for workers on several machines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ackbone.core.broker import Broker, Notices
from ackbone.core.checks import Check, Finding, refused
from ackbone.core.clock import Clock
from ackbone.core.errors import AckboneError, NotFound
from ackbone.core.store import Copies, Store
from ackbone.core.subscribers import Subscribers
from ackbone.store import migrate as sqlite_migrate
from ackbone.store.keep import Keep
from ackbone.store.postgres import migrate
from ackbone.store.postgres.address import Address
from ackbone.store.postgres.store import PostgresStore

from . import Acting, Looking, Migration, Stepper
from .sqlite import sqlite_paths

if TYPE_CHECKING:
    from ackbone.config import Config
    from ackbone.core.approvals import Clerk
    from ackbone.core.delivery import Deliveries
    from ackbone.core.meter import MetricRows
    from ackbone.store.ledger_report import LedgerReport, Progress
    from ackbone.store.outbox import OutboxRows
    from ackbone.store.postgres.wall import Admission


class PostgresStorage:
    """`Storage` in the database that the configuration names. A SQLite broker keeps its file."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._url = config.store
        self.place = Address.from_url(self._url).shown

    # -- the schema -------------------------------------------------------------------------------

    def ensure(self) -> None:
        migrate.ensure_schema(self._url)
        for path in self._files():
            sqlite_migrate.ensure_schema(path)

    def require(self) -> None:
        if migrate.current_revision(self._url) is None:
            raise NotFound(
                f"{self.place} has no ackbone tables yet. 'ackbone migrate' makes them, and so "
                "does the first worker; --config says where to look"
            )
        migrate.require_current(self._url)

    def migrate(self, *, check: bool) -> Sequence[Migration]:
        before, behind = migrate.current_revision(self._url), migrate.is_behind(self._url)
        if behind and not check:
            migrate.upgrade(self._url)
        elif not check:
            migrate.tend(self._url)
        found = [Migration(self.place, before, behind)]
        for path in self._files():
            was, old = sqlite_migrate.current_revision(path), sqlite_migrate.is_behind(path)
            if old and not check:
                sqlite_migrate.ensure_schema(path)
            found.append(Migration(str(path), was, old))
        return found

    def admit(self, *, worker: str | None, api: str | None) -> Sequence[Admission]:
        return migrate.admit(self._url, worker=worker, api=api)

    def _files(self) -> Sequence[Path]:
        return sqlite_paths(None, self._config)

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
        lease_s = self._config.worker.lease_s
        return PostgresStore(
            self._url,
            lease_s=lease_s,
            clock=clock,
            isolates=isolates,
            notices=notices,
            subscribers=subscribers,
        )

    def outbox(self, store: Store) -> OutboxRows:
        from ackbone.store.postgres.outbox import PostgresOutboxRows

        return PostgresOutboxRows(_ours(store))

    def deliveries(self, store: Store) -> Deliveries:
        from ackbone.store.postgres.deliveries import PostgresDeliveries

        return PostgresDeliveries(_ours(store))

    def metric_rows(self, store: Store) -> MetricRows:
        from ackbone.store.postgres.metric_rows import PostgresMetricRows

        return PostgresMetricRows(_ours(store))

    def anchors(self, store: Store, *, key: bytes, file: Path) -> Stepper:
        from ackbone.store.postgres.anchors import Anchors

        return Anchors(_ours(store), key=key, anchor_file=file)

    def pruner(self, store: Store, *, key: bytes, keep_days: float) -> Stepper:
        from ackbone.store.postgres.prune import Pruner

        return Pruner(_ours(store), key=key, keep_days=keep_days)

    def retention(self, store: Store, keep: Keep) -> Stepper:
        from ackbone.store.postgres.retention import Retention

        return Retention(_ours(store), keep)

    def clerk(self, store: Store) -> Clerk:
        from ackbone.store.postgres.clerk import PostgresClerk

        return PostgresClerk(_ours(store))

    def copies(self, store: Store) -> Copies:
        from ackbone.store.postgres.copies import PostgresCopies

        return PostgresCopies(_ours(store))

    def upkeep(self, store: Store) -> Sequence[Stepper]:
        from ackbone.store.postgres.months import Months

        return [Months(_ours(store))]

    # -- people -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Looking]:
        self.require()
        store = PostgresStore(self._url)
        await store.open()
        try:
            yield self.records(store)
        finally:
            await store.close()

    def records(self, store: Store, broker: Broker | None = None) -> Looking:
        from ackbone.store.postgres.records import PostgresRecords

        return PostgresRecords(_ours(store))

    def operations(
        self, store: Store, broker: Broker | None, *, by: str
    ) -> AbstractAsyncContextManager[Acting]:
        from ackbone.store.operations import StoreOperations

        return StoreOperations(_ours(store), by=by, beat_every_s=self._config.worker.lease_s / 4)

    def verify(self, key: bytes, anchor_file: Path, progress: Progress | None) -> LedgerReport:
        from ackbone.store.postgres.verify import verify_ledger

        return verify_ledger(self._url, key, anchor_file, progress)

    def examine(self, *, deep: bool) -> Sequence[Check]:
        from ackbone.admin import doctor
        from ackbone.store.postgres import checks

        found = [*doctor.check_home(self._config.home)]
        try:
            found += checks.examine(self._url, deep=deep)
        except AckboneError as error:
            found.append(refused("database", str(error)))
        if any(check.finding is Finding.REFUSED for check in found):
            return found
        return found


def _ours(store: Store) -> PostgresStore:
    if not isinstance(store, PostgresStore):
        raise TypeError(f"a PostgreSQL store is needed, not {type(store).__name__}")
    return store
