"""The roll of workers: who is there. Their leases are renewed by a thread, over a connection of its
own: neither a busy event loop nor a pool without a free connection may look like a death.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg

from holdfast.core.errors import StoreUnavailable
from holdfast.core.store import Worker

from .address import Address
from .failures import translate

REGISTER = (
    "INSERT INTO workers (name, state, started_at, beat, lease_until, machine, parent)"
    " VALUES ($1, 'alive', clock_timestamp(), 1,"
    " clock_timestamp() + $2::float8 * interval '1 second', $3, $4)"
    " RETURNING worker_id, started_at"
)
LEAVING = "UPDATE workers SET state = 'leaving' WHERE worker_id = $1::bigint AND state = 'alive'"
LEFT = (
    "UPDATE workers SET state = 'left', ended_at = clock_timestamp() WHERE worker_id = $1::bigint"
    " AND state IN ('alive', 'leaving')"
)
FREE_SOURCES = "UPDATE sources SET worker_id = NULL WHERE worker_id = $1::bigint"
FORGET = "DELETE FROM workers WHERE worker_id = $1::bigint AND state = 'left'"
_RENEW = (
    "UPDATE workers SET beat = beat + 1, lease_until = clock_timestamp()"
    " + %s::float8 * interval '1 second' WHERE worker_id = %s AND state IN ('alive', 'leaving')"
)
_STATE = "SELECT state FROM workers WHERE worker_id = %s"


class Pulse:
    """Signs of life, from threads.

    They tell, too, how the server fares: while it does not take ours, it takes nobody's, and a
    lease that ran out is nobody's death.
    """

    def __init__(self, address: Address, lease_s: float) -> None:
        self._address = address
        self._lease_s = lease_s
        self._conn: psycopg.Connection[Any] | None = None
        self._lock = threading.Lock()
        self._taken = time.monotonic()
        self._missed = -math.inf

    def begin(self) -> None:
        """A worker was registered: its lease is new."""
        self._taken = time.monotonic()

    def beat(self, worker: Worker) -> None:
        """Raises StoreUnavailable if it could not be given."""
        try:
            with self._connection() as conn:
                conn.execute(_RENEW, (self._lease_s, worker.worker_id))
        except BaseException:
            self._missed = time.monotonic()
            raise
        now = time.monotonic()
        if self._is_late(now):
            self._missed = now
        self._taken = now

    @property
    def is_steady(self) -> bool:
        """For a whole lease no sign of life was missed or late: who gave none was free to."""
        now = time.monotonic()
        return not self._is_late(now) and now - self._missed >= self._lease_s

    def _is_late(self, now: float) -> bool:
        """They come every third of a lease: a server that takes none for longer than one of these
        thirds may keep somebody else's from coming in time."""
        return now - self._taken > self._lease_s * 2 / 3

    def is_present(self, worker: Worker) -> bool:
        """May this number still write? Not once it left, or was declared dead."""
        with self._connection() as conn:
            found = conn.execute(_STATE, (worker.worker_id,)).fetchone()
        return found in (("alive",), ("leaving",))

    def close(self) -> None:
        with self._lock:
            conn, self._conn = self._conn, None
            if conn is not None:
                conn.close()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        with self._lock:
            try:
                if self._conn is None:
                    self._conn = self._connect()
                yield self._conn
            except (psycopg.Error, OSError) as error:
                conn, self._conn = self._conn, None
                if conn is not None:
                    conn.close()
                raise translate(error, self._address) or StoreUnavailable(str(error)) from error

    def _connect(self) -> psycopg.Connection[Any]:
        conn = psycopg.connect(self._address, autocommit=True)
        # A sign of life that comes too late is none; one that a crash of the server takes back is
        # given again before anybody reaps.
        limit_ms = max(500, int(self._lease_s * 500))
        conn.execute(f"SET statement_timeout = {limit_ms}")
        conn.execute("SET synchronous_commit = off")
        return conn
