"""Connections and transactions.

A transaction is a pipeline: a statement that needs no answer is sent with the next one, and the
last statements go out together with COMMIT. It runs in a task of its own: if the caller is
cancelled, the transaction ends as it would have. Failures that may safely be repeated (deadlock,
lost connection) are repeated here. `Tx.repeated` says that an earlier commit may have succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncPipeline, AsyncRawCursor

from ackbone.core.clock import Clock, SystemClock, to_us
from ackbone.core.errors import StoreUnavailable
from ackbone.store.outcomes import Letter
from ackbone.store.tables import GrantedRuns, KeyRows, LaneRows, QuotaRows, TaskRows

from . import arrays
from .address import Address
from .delivery_rows import PostgresDeliveryRows
from .failures import is_away, may_repeat, translate
from .granted_runs import PostgresGrantedRuns, UnsureRuns
from .key_rows import PostgresKeyRows, PostgresLaneRows, PostgresQuotaRows
from .sql import SQL
from .task_rows import PostgresTaskRows

T = TypeVar("T")
Row = tuple[Any, ...]
Op = Callable[["Tx"], Awaitable[T]]
log = logging.getLogger("ackbone.store")

CALL_S = 30.0
"""Longest time of one call, in seconds. After that, server and client give up."""
WRITERS, READERS = 6, 3
"""Connections at a time. A transaction may read beside itself: readers never wait for writers."""
KEPT = WRITERS + READERS
"""How many idle connections are kept."""
MUCH = 64_000
"""Above this many characters of values, a socket may not take them all at once."""
REPEATS = 8
RECONNECTS = 2

# Batches are joined to their rows one by one, through an index, in the order of the batch, so that
# sorted batches lock in one order. A plan made while the tables were small must not be kept.
_SETTINGS = {
    "TimeZone": "UTC",
    "statement_timeout": f"{CALL_S - 5:.0f}s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "10s",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}
_BEGIN = "SELECT clock_timestamp(), (SELECT state FROM workers WHERE worker_id = $1)"
_BEGIN_LOSSY = f"{_BEGIN}, set_config('synchronous_commit', 'off', true)"
_HOLD_DELIVERIES = "SELECT 1 FROM pg_advisory_xact_lock(7310579635104523)"
"""Every transaction that moves deliveries holds this lock, so that a lane has one delivery that is
being sent and a limit is counted once."""
_STILL_THERE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE pid = $1::int AND backend_start = $2::timestamptz"
)
_GONE_WITHIN_S = 5.0
_SYNCED = "SET LOCAL synchronous_commit TO DEFAULT"
"""Undoes `_BEGIN_LOSSY`: the commit reads the setting last."""


class Session:
    """One connection, and the server process behind it."""

    def __init__(self, conn: AsyncConnection[Row], backend: tuple[int, Any]) -> None:
        self.conn = conn
        self.backend = backend

    async def close(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            await self.conn.close()


class Look(NamedTuple):
    """The server's time, and when it was asked for and received, by the steady clock."""

    before_s: float
    server_us: int
    after_s: float

    @classmethod
    def of(cls, before_s: float, now: datetime, after_s: float) -> Look:
        return cls(before_s, to_us(now), after_s)

    @property
    def took_s(self) -> float:
        return self.after_s - self.before_s

    @property
    def ahead_us(self) -> int:
        """The server's clock minus the steady one, corrected by half of the round trip."""
        return self.server_us - int((self.before_s + self.after_s) / 2 * 1e6)


class Tx:
    """`ackbone.store.unit.Tx` on PostgreSQL. Its `moment` is its begin by the server's clock, or
    its last look at that clock."""

    sql = SQL
    exclusive = False
    now_us = None

    def __init__(
        self,
        conn: AsyncConnection[Row],
        pipeline: AsyncPipeline,
        clock: Clock,
        *,
        repeated: bool,
        unsure: UnsureRuns,
    ) -> None:
        self._conn = conn
        self._clock = clock
        self._asked_s = self._heard_s = 0.0
        """When its `moment` was asked for and received, by the steady clock."""
        self._pipeline = pipeline
        self._unheard = False
        self._unsent = 0
        self._begun: AsyncRawCursor[Row] | None = None
        self._opening: Row = ()
        self._locking: list[tuple[str, Sequence[Any]]] = []
        self._last: list[tuple[str, Sequence[Any]]] = []
        self.letters: dict[str, Letter] = {}
        """Dead letters that are written at the end, by their ids."""
        self.repeated = repeated
        """True if an attempt of this very call may have been committed, and its answer was lost."""
        self.if_unknown: Callable[[], None] | None = None
        """Called if it is unknown whether the transaction was committed."""
        self._unsure_runs = unsure

    @property
    def tasks(self) -> TaskRows:
        return PostgresTaskRows(self)

    @property
    def keys(self) -> KeyRows:
        return PostgresKeyRows(self)

    @property
    def lanes(self) -> LaneRows:
        return PostgresLaneRows(self)

    @property
    def quotas(self) -> QuotaRows:
        return PostgresQuotaRows(self)

    @property
    def granted(self) -> GrantedRuns:
        return PostgresGrantedRuns(self, self._unsure_runs)

    @property
    def deliveries(self) -> PostgresDeliveryRows:
        return PostgresDeliveryRows(self)

    async def begin(self, worker_id: int, *, durable: bool) -> None:
        self._asked_s = self._clock.monotonic()
        await self._conn.execute("BEGIN")
        statement = _BEGIN if durable else _BEGIN_LOSSY
        self._begun = await self._execute(statement, (str(worker_id),))

    async def rows(self, statement: str, *values: Any) -> list[Row]:
        """Send the statements that waited, then this one, and return its rows."""
        cursor = await self._execute(statement, values)
        found = await cursor.fetchall()
        self._unheard = False
        self._unsent = 0
        return found

    async def send(self, statement: str, *values: Any) -> None:
        """Send with the next statement. The answer is ignored; an error is raised later."""
        await self._execute(statement, values)
        self._unheard = True

    def before_end(self, statement: str, *values: Any) -> None:
        """Send before the statements of `at_end`: it may have to wait for a lock on its rows."""
        self._locking.append((statement, values))

    async def send_locking(self) -> None:
        """Send the statements of `before_end` now, so that their rows are locked before others."""
        await self._send_all(self._locking)

    def at_end(self, statement: str, *values: Any) -> None:
        """Send together with COMMIT: for new rows, or rows that are locked already."""
        self._last.append((statement, values))

    def sync_after_all(self) -> None:
        """Make a transaction durable that was begun without: its commit waits for the disk."""
        self.at_end(_SYNCED)

    async def hold_all_locks(self) -> None:
        """Wait until every statement that may wait for rows of another process has got them."""
        await self._send_all(self._locking)
        await self._send_much()
        if self._unheard:
            await self._pipeline.sync()
            self._unheard = False

    async def send_rest(self) -> None:
        """Send everything that is left before COMMIT."""
        await self._send_all(self._locking)
        await self._send_all(self._last)
        await self._send_much()

    async def _send_much(self) -> None:
        """Ask for rows if much is unsent. The driver's `sync` waits for an answer although the
        socket took only a part of the data, and both sides wait for ever; asking for rows sends
        all of it first.
        """
        if self._unsent > MUCH:
            await self.rows("SELECT 1")

    async def _send_all(self, waiting: list[tuple[str, Sequence[Any]]]) -> None:
        for statement, values in waiting:
            await self.send(statement, *values)
        waiting.clear()

    async def moment(self) -> int:
        """The time of this transaction (µs)."""
        return to_us((await self._opened())[0])

    async def look(self) -> Look:
        """The time of this transaction, and how exactly it is known."""
        now = (await self._opened())[0]
        return Look.of(self._asked_s, now, self._heard_s)

    async def look_at_clock(self) -> None:
        """Take the time of now: the transaction has seen what others committed since its begin,
        and its events must not seem to have come before."""
        _, *rest = await self._opened()
        self._asked_s = self._clock.monotonic()
        ((now,),) = await self.rows("SELECT clock_timestamp()")
        self._heard_s = self._clock.monotonic()
        self._opening = (now, *rest)

    async def hold_deliveries(self) -> int:
        await self.send(_HOLD_DELIVERIES)
        await self.look_at_clock()
        return await self.moment()

    async def state(self) -> str | None:
        """The state of the worker that this transaction was begun for."""
        found: str | None = (await self._opened())[1]
        return found

    async def require_alive(self, worker_id: int, *, or_leaving: bool = False) -> None:
        """Raise StoreUnavailable for a worker that was declared dead or left, and for one that is
        leaving unless that is allowed."""
        if await self.state() not in (("alive", "leaving") if or_leaving else ("alive",)):
            # Nothing would reap the claims of a dead worker id. The worker registers again.
            raise StoreUnavailable(f"worker {worker_id} was declared dead; nothing claimed")

    async def _opened(self) -> Row:
        if not self._opening:
            assert self._begun is not None  # noqa: S101 - `begin` comes first
            self._opening = (await self._begun.fetchall())[0]
            self._heard_s = self._clock.monotonic()
        return self._opening

    async def _execute(self, statement: str, values: Sequence[Any]) -> AsyncRawCursor[Row]:
        values = [_parameter(value) for value in values]
        self._unsent += sum([len(value) for value in values if isinstance(value, str | bytes)])
        cursor = AsyncRawCursor(self._conn)
        return await cursor.execute(statement, values, prepare=True, binary=True)


def _parameter(value: Any) -> Any:
    """Numbers and lists are sent as text: the statement decides the type of a parameter then."""
    kind = type(value)
    if kind is int:
        return str(value)
    return arrays.texts(value) if kind is list else value


Committer = Callable[[Tx, Callable[[], Awaitable[None]]], Awaitable[None]]
"""A function that gets a transaction that is ready, and the function that commits it."""


class Database:
    """The connections of one process."""

    def __init__(self, address: Address, clock: Clock | None = None) -> None:
        self.address = address
        self.clock = clock or SystemClock()
        self._idle: list[Session] = []
        self._is_open = False
        self._writers = asyncio.Semaphore(WRITERS)
        self._readers = asyncio.Semaphore(READERS)
        self._running: set[asyncio.Task[Any]] = set()
        self._away_at = -math.inf
        self._on_connect: list[Callable[[], None]] = []
        self.lost: list[tuple[int, Any]] = []
        """Server processes that may still be committing a transaction of a lost connection."""
        self.unsure = UnsureRuns(self.end_lost)

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Call `callback` for every new connection: commits that were not synced may be gone."""
        self._on_connect.append(callback)

    @property
    def steady_s(self) -> float:
        """How long the database has been reachable without a break, in seconds."""
        return time.monotonic() - self._away_at

    async def open(self) -> None:
        self._is_open = True
        try:
            async with self._translated():
                self._give(await self._connect())
        except BaseException:
            self._is_open = False
            raise

    async def close(self) -> None:
        if self._running:
            await asyncio.wait(set(self._running))
        self._is_open = False
        idle, self._idle = self._idle, []
        for session in idle:
            await session.close()

    async def end_lost(self) -> bool:
        """End server processes that may still commit a transaction of a lost connection. After
        that, everything that they committed can be read. Returns False if there was none."""
        if not self.lost:
            return False
        try:
            async with asyncio.timeout(_GONE_WITHIN_S):
                while self.lost:
                    backend = pid, since = self.lost[-1]
                    # Not in a transaction: it would only see the processes of its begin.
                    if await self.read(_STILL_THERE, str(pid), since):
                        await asyncio.sleep(0.02)
                    elif backend in self.lost:
                        self.lost.remove(backend)
        except TimeoutError:
            raise StoreUnavailable(
                f"{self.address.shown}: a lost connection is still active on the server, so nothing"
                " can be claimed or written to the ledger yet"
            ) from None
        return True

    # -- work -------------------------------------------------------------------------------------

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """Run one statement in its own transaction, again if the connection was stale."""
        return await self._shielded(self._read(statement, values))

    async def write(
        self,
        op: Op[T],
        *,
        worker_id: int,
        durable: bool,
        commit: Committer,
        limit_s: float | None = None,
    ) -> T:
        """Run `op` in one transaction. Raises StoreError, or the database's error about a value.

        `limit_s`: how long it may take, if that is not `CALL_S`."""
        return await self._shielded(self._write(op, worker_id, durable, commit, limit_s or CALL_S))

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work, name="ackbone-postgres")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _read(self, statement: str, values: Sequence[Any]) -> list[Row]:
        async with self._translated():
            for attempt in range(RECONNECTS + 1):
                try:
                    async with self._readers, asyncio.timeout(CALL_S), self._session() as session:
                        cursor = AsyncRawCursor(session.conn)
                        sent = [_parameter(value) for value in values]
                        await cursor.execute(statement, sent, prepare=True, binary=True)
                        return await cursor.fetchall() if cursor.description else []
                except (psycopg.Error, OSError) as error:
                    if not is_away(error) or attempt == RECONNECTS:
                        raise
                    await self._lost()
        raise AssertionError("unreachable")

    async def _write(
        self, op: Op[T], worker_id: int, durable: bool, commit: Committer, limit_s: float
    ) -> T:
        repeats = reconnects = 0
        unknown = False
        async with self._translated():
            while True:
                try:
                    async with self._writers, asyncio.timeout(limit_s), self._session() as session:
                        return await self._once(session, op, worker_id, durable, commit, unknown)
                except _Unknown as error:
                    unknown = True
                    await self._lost()
                    reconnects += 1
                    if reconnects > RECONNECTS:
                        raise error.why from None
                except (psycopg.Error, OSError) as error:
                    if may_repeat(error) and repeats < REPEATS:
                        repeats += 1
                        await asyncio.sleep(random.uniform(0, 0.01 * repeats))
                    elif is_away(error) and reconnects < RECONNECTS:
                        reconnects += 1
                        await self._lost()
                    else:
                        raise

    async def _once(
        self,
        session: Session,
        op: Op[T],
        worker_id: int,
        durable: bool,
        commit: Committer,
        repeated: bool,
    ) -> T:
        conn = session.conn
        tx: Tx | None = None
        committing = False

        async def finish() -> None:
            nonlocal committing
            assert tx is not None  # noqa: S101 - it is committed
            await tx.send_rest()
            committing = True
            cursor = await conn.execute("COMMIT")
            await pipeline.sync()
            if cursor.statusmessage != "COMMIT":
                committing = False
                raise psycopg.OperationalError(f"the commit became a {cursor.statusmessage}")

        try:
            async with conn.pipeline() as pipeline:
                tx = Tx(conn, pipeline, self.clock, repeated=repeated, unsure=self.unsure)
                await tx.begin(worker_id, durable=durable)
                result = await op(tx)
                await commit(tx, finish)
        except BaseException as error:
            # Only our own time limit cancels this.
            late = isinstance(error, asyncio.CancelledError)
            if committing and (late or is_away(error)):
                self.lost.append(session.backend)
                if tx is not None and tx.if_unknown is not None:
                    tx.if_unknown()
                why = TimeoutError("the server did not answer in time") if late else error
                raise _Unknown(why) from error
            raise
        return result

    # -- connections ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        session = self._idle.pop() if self._idle else await self._connect()
        try:
            yield session
        except BaseException:
            await self._after_failure(session)
            raise
        self._give(session)

    async def _after_failure(self, session: Session) -> None:
        """Bring the connection back to a clean state, or close it."""
        status = psycopg.pq.TransactionStatus
        try:
            async with asyncio.timeout(1):
                if session.conn.info.transaction_status in (status.INERROR, status.INTRANS):
                    await session.conn.execute("ROLLBACK")
            if session.conn.info.transaction_status is status.IDLE:
                self._give(session)
                return
        except (psycopg.Error, OSError, TimeoutError) as error:
            log.debug("closing a connection: %s", error)
        await session.close()

    def _give(self, session: Session) -> None:
        if self._is_open and len(self._idle) < KEPT and not session.conn.closed:
            self._idle.append(session)
        else:
            asyncio.get_running_loop().create_task(session.close())

    async def _lost(self) -> None:
        """A connection broke. The others are as old and most likely broken, too: close them."""
        self._away_at = time.monotonic()
        idle, self._idle = self._idle, []
        for session in idle:
            await session.close()

    async def _connect(self) -> Session:
        if not self._is_open:
            raise StoreUnavailable(f"the store ({self.address.shown}) is not open")
        conn = await self.connect()
        try:
            names = ", ".join(f"set_config('{k}', '{v}', false)" for k, v in _SETTINGS.items())
            await conn.execute(f"SELECT {names}")
            cursor = await conn.execute(
                "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
            )
            backend = await cursor.fetchone()
        except BaseException:
            await conn.close()
            raise
        for callback in self._on_connect:
            callback()
        return Session(conn, backend or (0, None))

    async def connect(self) -> AsyncConnection[Row]:
        """Open a connection that belongs to the caller, not to the pool."""
        return await AsyncConnection.connect(
            self.address, autocommit=True, prepare_threshold=None, cursor_factory=AsyncRawCursor
        )

    @contextlib.asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            yield
        except (psycopg.Error, OSError) as error:
            if is_away(error):
                self._away_at = time.monotonic()
            translated = translate(error, self.address)
            if translated is None:
                raise
            raise translated from error


class _Unknown(Exception):
    """COMMIT was sent, and its answer was lost."""

    def __init__(self, why: BaseException) -> None:
        super().__init__(str(why))
        self.why = why
