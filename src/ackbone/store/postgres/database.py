"""Connections and transactions.

A transaction is a pipeline: what needs no answer is sent with what follows it, and the last
statements go out together with COMMIT. It runs in a task of its own: whoever waits may be
cancelled, the transaction ends as it would have. What a batch may safely repeat (deadlock, lost
connection) is repeated here; what the caller must know of a commit without an answer, it is told.
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
from ackbone.store.letters import Letter

from . import arrays
from .address import Address
from .failures import is_away, may_repeat, translate
from .sql import SQL

T = TypeVar("T")
Row = tuple[Any, ...]
Op = Callable[["Tx"], Awaitable[T]]
log = logging.getLogger("ackbone.store")

CALL_S = 30.0
"""No call takes longer: the server is told to give up, and so does the client."""
WRITERS, READERS = 6, 3
"""Connections at a time. A transaction may read beside itself: readers never wait for writers."""
KEPT = WRITERS + READERS
"""Idle connections that are kept."""
MUCH = 64_000
"""Characters of values that a socket may not take at once."""
REPEATS = 8
RECONNECTS = 2

# Batches are joined to their rows one by one, through an index, in the order that they come in:
# sorted batches then lock in one order. A plan made while the tables were small must not be kept.
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
"""Everybody who changes where deliveries are holds this lock, so that a lane has one delivery that
is being sent and a limit is counted once."""
_SYNCED = "SET LOCAL synchronous_commit TO DEFAULT"
"""What `_BEGIN_LOSSY` took away: the commit looks at it last."""


class Session:
    """One connection, and which process of the server is behind it."""

    def __init__(self, conn: AsyncConnection[Row], backend: tuple[int, Any]) -> None:
        self.conn = conn
        self.backend = backend

    async def close(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            await self.conn.close()


class Look(NamedTuple):
    """The server's time, asked for and heard at these moments of the steady clock."""

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
        """The server's clock minus the steady one, half of the way there and back taken off."""
        return self.server_us - int((self.before_s + self.after_s) / 2 * 1e6)


class Tx:
    """`ackbone.store.unit.Tx` on PostgreSQL. Its `moment` is when it was begun, by the server's
    clock, or when it last looked at it."""

    sql = SQL

    def __init__(
        self, conn: AsyncConnection[Row], pipeline: AsyncPipeline, clock: Clock, *, repeated: bool
    ) -> None:
        self._conn = conn
        self._clock = clock
        self._asked_s = self._heard_s = 0.0
        """When it asked for its `moment`, and heard it, by the steady clock."""
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
        """An attempt of this very call may have been committed, its answer lost."""
        self.if_unknown: Callable[[], None] | None = None
        """Called if it is not known whether this was committed."""

    async def begin(self, worker_id: int, *, durable: bool) -> None:
        self._asked_s = self._clock.monotonic()
        await self._conn.execute("BEGIN")
        statement = _BEGIN if durable else _BEGIN_LOSSY
        self._begun = await self._execute(statement, (str(worker_id),))

    async def rows(self, statement: str, *values: Any) -> list[Row]:
        """Sends what waited, then this, and returns its rows."""
        cursor = await self._execute(statement, values)
        found = await cursor.fetchall()
        self._unheard = False
        self._unsent = 0
        return found

    async def send(self, statement: str, *values: Any) -> None:
        """Sent with whatever comes next; its answer is not looked at, an error is raised later."""
        await self._execute(statement, values)
        self._unheard = True

    def before_end(self, statement: str, *values: Any) -> None:
        """Sent before what is `at_end`: it may have to wait for a lock on its rows."""
        self._locking.append((statement, values))

    async def send_locking(self) -> None:
        """What waited to be sent `before_end` goes now: its rows are locked before later ones."""
        await self._send_all(self._locking)

    def at_end(self, statement: str, *values: Any) -> None:
        """Sent together with COMMIT: new rows, or rows that are locked already."""
        self._last.append((statement, values))

    def sync_after_all(self) -> None:
        """Begun as one that need not be durable, it is to be: its commit waits for the disk."""
        self.at_end(_SYNCED)

    async def hold_all_locks(self) -> None:
        """Returns when everything that might wait for somebody else's rows has got them."""
        await self._send_all(self._locking)
        await self._send_much()
        if self._unheard:
            await self._pipeline.sync()
            self._unheard = False

    async def send_rest(self) -> None:
        """Whatever is left to be sent before COMMIT."""
        await self._send_all(self._locking)
        await self._send_all(self._last)
        await self._send_much()

    async def _send_much(self) -> None:
        """The driver's `sync` waits for an answer although the socket took only a part of what
        there is to send, and both sides wait for ever; whoever wants rows sends all of it first.
        """
        if self._unsent > MUCH:
            await self.rows("SELECT 1")

    async def _send_all(self, waiting: list[tuple[str, Sequence[Any]]]) -> None:
        for statement, values in waiting:
            await self.send(statement, *values)
        waiting.clear()

    async def moment(self) -> int:
        """Its time (µs)."""
        return to_us((await self._opened())[0])

    async def look(self) -> Look:
        """Its time, and how exactly that is known."""
        now = (await self._opened())[0]
        return Look.of(self._asked_s, now, self._heard_s)

    async def look_at_clock(self) -> None:
        """What it tells from here on is told as now: it has seen what others committed since it
        was begun, and must not seem to have come before."""
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
        """Of the worker that it was begun for."""
        found: str | None = (await self._opened())[1]
        return found

    async def require_alive(self, worker_id: int, *, or_leaving: bool = False) -> None:
        """Raises StoreUnavailable for a worker that was declared dead or left, and for one that is
        leaving unless that is allowed."""
        if await self.state() not in (("alive", "leaving") if or_leaving else ("alive",)):
            # Nobody would reap what a dead number claims. The worker registers again, and asks.
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
    """Numbers and lists are sent as text: the type of a parameter is then its statement's."""
    kind = type(value)
    if kind is int:
        return str(value)
    return arrays.texts(value) if kind is list else value


Committer = Callable[[Tx, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Called with a transaction that is ready, and the function that commits it."""


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
        """Processes of the server that may still be committing what we lost sight of."""

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Called whenever a connection was made: what was not synced may be gone."""
        self._on_connect.append(callback)

    @property
    def steady_s(self) -> float:
        """For so long the database has been there without a break, as far as we know."""
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

    # -- work -------------------------------------------------------------------------------------

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """One statement by itself, of its own transaction; repeated if a connection was stale."""
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
        """`op` in one transaction. Raises StoreError, or what the database said of a value.

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
                tx = Tx(conn, pipeline, self.clock, repeated=repeated)
                await tx.begin(worker_id, durable=durable)
                result = await op(tx)
                await commit(tx, finish)
        except BaseException as error:
            # Nobody but our own time limit cancels this.
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
        """Back to a clean state, or away with it."""
        status = psycopg.pq.TransactionStatus
        try:
            async with asyncio.timeout(1):
                if session.conn.info.transaction_status in (status.INERROR, status.INTRANS):
                    await session.conn.execute("ROLLBACK")
            if session.conn.info.transaction_status is status.IDLE:
                self._give(session)
                return
        except (psycopg.Error, OSError, TimeoutError) as error:
            log.debug("a connection is given up: %s", error)
        await session.close()

    def _give(self, session: Session) -> None:
        if self._is_open and len(self._idle) < KEPT and not session.conn.closed:
            self._idle.append(session)
        else:
            asyncio.get_running_loop().create_task(session.close())

    async def _lost(self) -> None:
        """A connection broke: the others are as old, and most likely broken, too."""
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
        """A connection of the caller's own, not of the pool."""
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
    """COMMIT was sent, and no answer came."""

    def __init__(self, why: BaseException) -> None:
        super().__init__(str(why))
        self.why = why
