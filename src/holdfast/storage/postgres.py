"""The truth in a PostgreSQL database, for workers on several machines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.broker import Broker, Notices
from holdfast.core.checks import Check, Finding, refused
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.store import Copies, Store
from holdfast.core.subscribers import Subscribers
from holdfast.store import migrate as sqlite_migrate
from holdfast.store.keep import Keep
from holdfast.store.postgres import migrate
from holdfast.store.postgres.address import Address
from holdfast.store.postgres.store import PostgresStore

from . import Acting, Looking, Migration, Stepper
from .sqlite import sqlite_paths

if TYPE_CHECKING:
    from holdfast.config import Config
    from holdfast.core.approvals import Clerk
    from holdfast.core.delivery import Deliveries
    from holdfast.core.meter import MetricRows
    from holdfast.store.ledger_report import LedgerReport, Progress
    from holdfast.store.outbox import OutboxRows
    from holdfast.store.postgres.wall import Admission


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
                f"{self.place} has no holdfast tables yet. 'holdfast migrate' makes them, and so "
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
        from holdfast.store.postgres.outbox import PostgresOutboxRows

        return PostgresOutboxRows(_ours(store))

    def deliveries(self, store: Store) -> Deliveries:
        from holdfast.store.postgres.deliveries import PostgresDeliveries

        return PostgresDeliveries(_ours(store))

    def metric_rows(self, store: Store) -> MetricRows:
        from holdfast.store.postgres.metric_rows import PostgresMetricRows

        return PostgresMetricRows(_ours(store))

    def anchors(self, store: Store, *, key: bytes, file: Path) -> Stepper:
        from holdfast.store.postgres.anchors import Anchors

        return Anchors(_ours(store), key=key, anchor_file=file)

    def pruner(self, store: Store, *, key: bytes, keep_days: float) -> Stepper:
        from holdfast.store.postgres.prune import Pruner

        return Pruner(_ours(store), key=key, keep_days=keep_days)

    def retention(self, store: Store, keep: Keep) -> Stepper:
        from holdfast.store.postgres.retention import Retention

        return Retention(_ours(store), keep)

    def clerk(self, store: Store) -> Clerk:
        from holdfast.store.postgres.clerk import PostgresClerk

        return PostgresClerk(_ours(store))

    def copies(self, store: Store) -> Copies:
        from holdfast.store.postgres.copies import PostgresCopies

        return PostgresCopies(_ours(store))

    def upkeep(self, store: Store) -> Sequence[Stepper]:
        from holdfast.store.postgres.months import Months

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
        from holdfast.store.postgres.records import PostgresRecords

        return PostgresRecords(_ours(store))

    def operations(
        self, store: Store, broker: Broker | None, *, by: str
    ) -> AbstractAsyncContextManager[Acting]:
        from holdfast.store.operations import StoreOperations

        return StoreOperations(_ours(store), by=by, beat_every_s=self._config.worker.lease_s / 4)

    def verify(self, key: bytes, anchor_file: Path, progress: Progress | None) -> LedgerReport:
        from holdfast.store.postgres.verify import verify_ledger

        return verify_ledger(self._url, key, anchor_file, progress)

    def examine(self, *, deep: bool) -> Sequence[Check]:
        from holdfast.admin import doctor
        from holdfast.store.postgres import checks

        found = [*doctor.check_home(self._config.home)]
        try:
            found += checks.examine(self._url, deep=deep)
        except HoldfastError as error:
            found.append(refused("database", str(error)))
        if any(check.finding is Finding.REFUSED for check in found):
            return found
        return found


def _ours(store: Store) -> PostgresStore:
    if not isinstance(store, PostgresStore):
        raise TypeError(f"a PostgreSQL store is needed, not {type(store).__name__}")
    return store
