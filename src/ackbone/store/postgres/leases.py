"""Leases of workers: a row for each, which a thread renews over a connection of its own.

Neither a busy event loop nor a pool without a free connection may look like a death.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import psycopg

from ackbone.core.clock import SystemClock
from ackbone.core.errors import StoreUnavailable
from ackbone.core.store import PARENT_WORKER, Worker
from ackbone.pgserver import arrays
from ackbone.pgserver.address import Address
from ackbone.pgserver.failures import translate
from ackbone.store.workers import Gone

from .database import Tx
from .timebase import MOVED

REGISTER = (
    "INSERT INTO workers (name, state, started_at, beat, lease_until, offers, machine, parent)"
    " VALUES ($1, 'alive', clock_timestamp(), 1,"
    " clock_timestamp() + $2::float8 * interval '1 second', $3, $4, $5)"
    " RETURNING worker_id, started_at"
)
_PRESENT = "w.state IN ('alive', 'leaving')"
_OTHERS = f"FROM workers w WHERE {_PRESENT} AND w.worker_id <> $1::bigint ORDER BY w.worker_id"
LOOK = (
    f"SELECT clock_timestamp(), {MOVED}, pg_postmaster_start_time(),"
    f" ARRAY(SELECT w.worker_id {_OTHERS}), ARRAY(SELECT w.beat {_OTHERS}),"
    " EXISTS (SELECT 1 FROM queue_executions q WHERE q.status = 'running' AND NOT EXISTS"
    f" (SELECT 1 FROM workers w WHERE w.worker_id = q.worker_id AND {_PRESENT}))"
)
"""The server's clock, when this server was started, the beats of the other workers, and whether a
message runs under the id of a worker that is not there any more."""
_OUTLIVED = (
    "EXISTS (SELECT 1 FROM workers x WHERE x.state IN ('alive', 'leaving')"
    " AND x.worker_id <> w.worker_id AND x.machine = w.machine"
    " AND x.lease_until > w.lease_until + $4::float8 * interval '0.5 second'{})"
)
"""Workers of one machine that die together gave their last beats within a third of a lease. Only a
worker whose last beat is half a lease younger has outlived another one. While the server's clock is
set back, no worker seems to have outlived another, and deaths do not count."""
_GONE = (
    "SELECT w.worker_id, w.state, w.name, w.parent, EXISTS (SELECT 1 FROM workers p"
    f" WHERE p.state IN ('alive', 'leaving') AND w.parent = '{PARENT_WORKER}' || p.worker_id"
    f" AND p.worker_id <> ALL($2::bigint[])), {_OUTLIVED.format('')},"
    f" {_OUTLIVED.format(' AND x.parent = w.parent')}, "
    + _OUTLIVED.format(" AND x.started_at < w.lease_until - $4::float8 * interval '1 second'")
    + f" FROM workers w WHERE {_PRESENT} AND w.worker_id <> $1::bigint"
    " AND ((w.worker_id, w.beat) IN (SELECT * FROM unnest($2::bigint[], $3::bigint[]))"
    f" OR (w.parent = '{PARENT_WORKER}' || $1 AND w.name = ANY($5::text[])))"
    " ORDER BY w.worker_id FOR UPDATE OF w SKIP LOCKED"
)
_RENEW = (
    "UPDATE workers SET beat = beat + 1, lease_until = clock_timestamp()"
    " + %s::float8 * interval '1 second' WHERE worker_id = %s AND state IN ('alive', 'leaving')"
)
_STATE = "SELECT state FROM workers WHERE worker_id = %s"
_steady_s = SystemClock().monotonic
"""This clock runs while the machine sleeps, and then all workers of the machine missed beats."""


class Sign(NamedTuple):
    """The last beat of a worker."""

    worker_id: int
    beat: int


async def missing(
    tx: Tx, me: Worker, silent: Sequence[Sign], lease_s: float, children: Sequence[str]
) -> list[Gone]:
    """The silent workers and these children of this worker, locked, and what is known about their
    machine. A worker that has given a beat since the look is left out."""
    rows = await tx.rows(
        _GONE,
        me.worker_id,
        arrays.numbers(sign.worker_id for sign in silent),
        arrays.numbers(sign.beat for sign in silent),
        str(lease_s),
        list(children),
    )
    return [Gone(*row) for row in rows]


class BeatWatch:
    """Finds workers whose beat has not changed for a lease, by this process's steady clock.

    The server's clock does not count: it may be set. A worker that this process sees for the first
    time has a whole lease. So have all workers when another server answers (it was restarted, or a
    standby took its place), because they could not give beats meanwhile.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        """The last beat that was seen of each worker, and when it was new."""
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
        """Return the old ones of these beats, which were asked for and heard at these moments."""
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
        """Return True if the same server has answered for a lease."""
        return now_s - self._server_since >= lease_s


class LeaseRenewal:
    """Renews the leases of this process, from threads.

    It also shows the state of the server: while the server does not take our beats, it takes no
    worker's, and a silent worker need not be dead.
    """

    def __init__(self, address: Address, lease_s: float) -> None:
        self._address = address
        self._lease_s = lease_s
        self._conn: psycopg.Connection[Any] | None = None
        self._lock = threading.Lock()
        self._taken = _steady_s()
        self._missed = -math.inf

    def begin(self) -> None:
        """A worker was registered, so its lease is new."""
        self._taken = _steady_s()

    def beat(self, worker: Worker) -> None:
        """Renew a lease. Raises StoreUnavailable if that is not possible."""
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
        """True if no beat of this process was missed or late for a whole lease. Other workers
        could have given theirs, too."""
        now = _steady_s()
        return not self._is_late(now) and now - self._missed >= self._lease_s

    def _is_late(self, now: float) -> bool:
        """Beats come every third of a lease. A server that takes none for two of these thirds may
        keep another worker's beat from coming in time."""
        return now - self._taken > self._lease_s * 2 / 3

    def is_present(self, worker: Worker) -> bool:
        """Return True if the worker may write: it has not left and was not declared dead."""
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
        # A beat that comes too late does not count. A beat that a crash of the server takes back is
        # given again before any worker is reaped.
        limit_ms = max(500, int(self._lease_s * 500))
        conn.execute(f"SET statement_timeout = {limit_ms}")
        conn.execute("SET synchronous_commit = off")
        return conn
