"""A server whose clock a test moves: `clock_timestamp()` and `transaction_timestamp()` of one
database, for all its connections.

Nothing of the store is changed for it: in that database its statements find other functions of the
same names first.
"""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg

from ackbone.core.clock import from_us
from ackbone.core.store import Worker
from ackbone.store.postgres.store import PostgresStore
from ackbone.testing.clock import FakeClock

_SETUP = """
CREATE SCHEMA fake;
CREATE TABLE fake.clock (at timestamptz NOT NULL, since timestamptz PRIMARY KEY);
INSERT INTO fake.clock VALUES ('{at}', '-infinity');
CREATE FUNCTION fake.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
  AS 'SELECT at FROM fake.clock ORDER BY since DESC LIMIT 1';
CREATE FUNCTION fake.transaction_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
  AS 'SELECT at FROM fake.clock WHERE since <= pg_catalog.transaction_timestamp()
      ORDER BY since DESC LIMIT 1';
CREATE FUNCTION fake.pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql STABLE
  AS $$SELECT timestamptz 'epoch'$$;
DO $$BEGIN
  EXECUTE format('ALTER DATABASE %I SET search_path = fake, pg_catalog, public',
                 current_database());
END$$;
"""
START = datetime(2026, 1, 1, tzinfo=UTC)


def silence(store: PostgresStore, url: str, worker: Worker) -> None:
    """To this store, the worker has given no sign of life for ever."""
    with psycopg.connect(url) as conn:
        found = conn.execute(
            "SELECT beat FROM workers WHERE worker_id = %s", (worker.worker_id,)
        ).fetchone()
    assert found is not None
    store._watch._seen[worker.worker_id] = (found[0], float("-inf"))


class ServerClock(FakeClock):
    """A `FakeClock` that the database at `url` goes by, too. Made before anybody connects to it."""

    def __init__(self, url: str) -> None:
        super().__init__(START)
        self._conn = psycopg.connect(url, autocommit=True)
        self._conn.execute(_SETUP.format(at=START.isoformat()))
        self.on_advance(self._move)

    def _move(self) -> None:
        self._conn.execute(
            "INSERT INTO fake.clock VALUES (%s, pg_catalog.clock_timestamp())",
            (from_us(self.now_us()),),
        )

    def close(self) -> None:
        self._conn.close()
