"""The roll of workers: who is there. Their leases are renewed by a thread, over a connection of its
own: neither a busy event loop nor a pool without a free connection may look like a death.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import psycopg

from ackbone.core.clock import SystemClock
from ackbone.core.errors import StoreUnavailable
from ackbone.core.store import Worker

from .address import Address
from .failures import translate

REGISTER = (
    "INSERT INTO workers (name, state, started_at, beat, lease_until, offers, machine, parent)"
    " VALUES ($1, 'alive', clock_timestamp(), 1,"
    " clock_timestamp() + $2::float8 * interval '1 second', $3, $4, $5)"
    " RETURNING worker_id, started_at"
)
ANNOUNCE = "UPDATE workers SET offers = $2 WHERE worker_id = $1::bigint"
LEAVING = "UPDATE workers SET state = 'leaving' WHERE worker_id = $1::bigint AND state = 'alive'"
LEFT = (
    "UPDATE workers SET state = 'left', ended_at = clock_timestamp() WHERE worker_id = $1::bigint"
    " AND state IN ('alive', 'leaving')"
)
OFFERS = (
    "SELECT offers FROM workers WHERE offers IS NOT NULL AND (state IN ('alive', 'leaving')"
    " OR ended_at BETWEEN clock_timestamp() - $1::float8 * interval '1 second'"
    " AND clock_timestamp())"
)
"""After the clock was set back, an end in the future is no recent one."""
FREE_SOURCES = "UPDATE sources SET worker_id = NULL WHERE worker_id = $1::bigint"
FORGET = "DELETE FROM workers WHERE worker_id = $1::bigint AND state = 'left'"
_RENEW = (
    "UPDATE workers SET beat = beat + 1, lease_until = clock_timestamp()"
    " + %s::float8 * interval '1 second' WHERE worker_id = %s AND state IN ('alive', 'leaving')"
)
_STATE = "SELECT state FROM workers WHERE worker_id = %s"
_steady_s = SystemClock().monotonic
"""Counts while the machine sleeps: then all of its workers missed their signs of life."""


class Sign(NamedTuple):
    """A worker's last sign of life."""

    worker_id: int
    beat: int


class Watch:
    """Which workers have given no new sign of life for a lease, by this process's steady clock.

    The server's clock does not count: it may be set. A worker that this process sees for the first
    time has a whole lease, and so have all when another server answers (it was started again, or
    a standby took its place): they could not give signs of life meanwhile.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        """By worker: the sign of life that was seen last, and when it was new."""
        self._server: object = None
        self._server_since = -math.inf

    def silent(
        self,
        signs: Iterable[Sign],
        server: object,
        lease_s: float,
        *,
        before_s: float,
        now_s: float,
    ) -> list[Sign]:
        """Of these signs, which were asked for and heard at these moments, those that are old."""
        if self._server != server:
            self._server_since = -math.inf if self._server is None else now_s
            self._server = server
        seen = {}
        for worker_id, beat in signs:
            known = self._seen.get(worker_id)
            seen[worker_id] = known if known and known[0] == beat else (beat, now_s)
        self._seen = seen
        if not self.is_settled(lease_s, before_s):
            return []
        return [
            Sign(worker_id, beat)
            for worker_id, (beat, since_s) in seen.items()
            if before_s - since_s >= lease_s
        ]

    def is_settled(self, lease_s: float, now_s: float) -> bool:
        """The same server has answered for a lease."""
        return now_s - self._server_since >= lease_s


class Pulse:
    """Signs of life, from threads.

    They tell, too, how the server fares: while it does not take ours, it takes nobody's, and
    silence is nobody's death.
    """

    def __init__(self, address: Address, lease_s: float) -> None:
        self._address = address
        self._lease_s = lease_s
        self._conn: psycopg.Connection[Any] | None = None
        self._lock = threading.Lock()
        self._taken = _steady_s()
        self._missed = -math.inf

    def begin(self) -> None:
        """A worker was registered: its lease is new."""
        self._taken = _steady_s()

    def beat(self, worker: Worker) -> None:
        """Raises StoreUnavailable if it could not be given."""
        try:
            with self._connection() as conn:
                conn.execute(_RENEW, (self._lease_s, worker.worker_id))
        except BaseException:
            self._missed = _steady_s()
            raise
        now = _steady_s()
        if self._is_late(now):
            self._missed = now
        self._taken = now

    @property
    def is_steady(self) -> bool:
        """For a whole lease no sign of life was missed or late: who gave none was free to."""
        now = _steady_s()
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
