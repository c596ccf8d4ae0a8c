"""The PostgreSQL store passes the suites of stores and of governance, by the server's clock."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from ackbone.core.outbound.delivery import Deliveries
from ackbone.core.store import Worker
from ackbone.store.operations import StoreOperations
from ackbone.store.postgres.deliveries import PostgresDeliveries
from ackbone.store.postgres.records import PostgresRecords
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.upkeep import StoreGovernance
from tests.servers.postgres_clock import ServerClock, silence
from tests.suites.checks.delivery_desk import Desk
from tests.suites.checks.store_governance import Office
from tests.suites.delivery_suite import DeliveryDeskConformance
from tests.suites.governance_suite import GovernanceConformance
from tests.suites.store_harness import LEASE_S, Store, StoreHarness
from tests.suites.store_suite import StoreConformance

pytestmark = pytest.mark.xdist_group("postgres")


class OnPostgres(StoreHarness):
    def setup_method(self) -> None:
        """The clock is the server's, and comes with its database."""

    @pytest.fixture(autouse=True)
    def _database(self, postgres_url: str) -> Iterator[None]:
        self._url = postgres_url
        self.clock = ServerClock(postgres_url)
        yield
        self.clock.close()

    async def make_store(self) -> Store:
        return PostgresStore(self._url, lease_s=LEASE_S, clock=self.clock)

    async def let_die(self, store: Store, worker: Worker) -> None:
        """No sign of life came for longer than its lease."""
        assert isinstance(store, PostgresStore)
        silence(store, self._url, worker)
        with psycopg.connect(self._url) as conn:
            conn.execute(
                "UPDATE workers SET lease_until = clock_timestamp() - interval '1 second',"
                " started_at = least(started_at, clock_timestamp() - %s * interval '1 second')"
                " WHERE worker_id = %s",
                (2 * LEASE_S, worker.worker_id),
            )


class TestPostgresStore(OnPostgres, StoreConformance):
    """The store in a database of its own."""


class TestPostgresGovernance(OnPostgres, GovernanceConformance):
    @asynccontextmanager
    async def open_office(self, store: Store) -> AsyncIterator[Office]:
        assert isinstance(store, PostgresStore)
        async with StoreOperations(store, by="suite") as operations:
            yield Office(
                answers=operations, records=PostgresRecords(store), upkeep=StoreGovernance(store)
            )


class TestPostgresDeliveries(OnPostgres, DeliveryDeskConformance):
    def make_deliveries(self, store: Store) -> Deliveries:
        assert isinstance(store, PostgresStore)
        return PostgresDeliveries(store)

    @asynccontextmanager
    async def open_desk(self, store: Store) -> AsyncIterator[Desk]:
        assert isinstance(store, PostgresStore)
        async with StoreOperations(store, by="suite") as operations:
            yield Desk(operations, PostgresRecords(store))
