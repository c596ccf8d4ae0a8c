"""The PostgreSQL store passes the store suite, by the server's clock."""

from collections.abc import Iterator

import psycopg
import pytest

from holdfast.core.store import Worker
from holdfast.store.postgres.store import PostgresStore
from holdfast.testing import StoreConformance
from holdfast.testing.store_harness import LEASE_S, Store
from tests.servers.postgres_clock import ServerClock

pytestmark = pytest.mark.xdist_group("postgres")


class TestPostgresStore(StoreConformance):
    def setup_method(self) -> None:
        """The clock is the server's, and comes with its database."""

    @pytest.fixture(autouse=True)
    def _database(self, postgres_url: str) -> Iterator[None]:
        self._url = postgres_url
        self.clock = ServerClock(postgres_url)
        yield
        self.clock.close()

    async def make_store(self) -> Store:
        return PostgresStore(self._url, lease_s=LEASE_S)

    async def let_die(self, store: Store, worker: Worker) -> None:
        """No sign of life came for longer than its lease."""
        with psycopg.connect(self._url) as conn:
            conn.execute(
                "UPDATE workers SET lease_until = clock_timestamp() - interval '1 second'"
                " WHERE worker_id = %s",
                (worker.worker_id,),
            )
