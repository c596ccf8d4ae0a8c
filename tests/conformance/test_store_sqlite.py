"""The SQLite store passes the store suite, alone and with a queue in its file."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.outbound.delivery import Deliveries
from ackbone.core.store import Worker
from ackbone.store.operations import StoreOperations
from ackbone.store.sqlite.deliveries import SqliteDeliveries
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.records import SqliteRecords
from ackbone.store.sqlite.store import SqliteStore
from ackbone.store.upkeep import StoreGovernance
from tests.suites.checks.delivery_desk import Desk
from tests.suites.checks.store_governance import Office
from tests.suites.delivery_suite import DeliveryDeskConformance
from tests.suites.governance_suite import GovernanceConformance
from tests.suites.store_harness import Store, StoreHarness
from tests.suites.store_suite import StoreConformance


class OnSqlite(StoreHarness):
    def setup_method(self) -> None:
        super().setup_method()
        self._folder = tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp")
        self._path = Path(self._folder.name) / "store.db"
        ensure_schema(self._path)

    def teardown_method(self) -> None:
        self._folder.cleanup()

    async def make_store(self) -> Store:
        return SqliteStore(self._path, clock=self.clock)

    async def let_die(self, store: Store, worker: Worker) -> None:
        assert isinstance(store, SqliteStore)
        store._leases.release(worker.worker_id)  # its lock is free, as after a kill

    def forget_all(self, store: Store) -> None:
        assert isinstance(store, SqliteStore)
        store._leases._seen.clear()


class TestSqliteStore(OnSqlite, StoreConformance):
    """The store in a file of its own."""


class TestSqliteGovernance(OnSqlite, GovernanceConformance):
    @asynccontextmanager
    async def open_office(self, store: Store) -> AsyncIterator[Office]:
        assert isinstance(store, SqliteStore)
        async with StoreOperations(store, by="suite") as operations:
            yield Office(
                answers=operations, records=SqliteRecords(store.file), upkeep=StoreGovernance(store)
            )


class TestSqliteDeliveries(OnSqlite, DeliveryDeskConformance):
    def make_deliveries(self, store: Store) -> Deliveries:
        assert isinstance(store, SqliteStore)
        return SqliteDeliveries(store)

    @asynccontextmanager
    async def open_desk(self, store: Store) -> AsyncIterator[Desk]:
        assert isinstance(store, SqliteStore)
        async with StoreOperations(store, by="suite") as operations:
            yield Desk(operations, SqliteRecords(store.file))


class TestSqliteStoreWithItsQueue(TestSqliteStore):
    async def make_store(self) -> Store:
        return SqliteStore(self._path, queue=SqliteBroker(self._path, self.clock), clock=self.clock)
