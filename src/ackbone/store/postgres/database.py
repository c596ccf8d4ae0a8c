"""Transactions.

A transaction is a pipeline: a statement that needs no answer is sent with the next one, and the
last statements go out together with COMMIT. It runs in a task of its own: if the caller is
cancelled, the transaction ends as it would have. Failures that may safely be repeated (deadlock,
lost connection) are repeated here. `Tx.repeated` says that an earlier commit may have succeeded.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncPipeline, AsyncRawCursor

from ackbone.core.clock import Clock, to_us
from ackbone.core.errors import StoreUnavailable
from ackbone.pgserver.address import Address
from ackbone.pgserver.connections import (
    CALL_S,
    RECONNECTS,
    WRITERS,
    Connections,
    Row,
    Session,
    parameter,
)
from ackbone.pgserver.failures import is_away, may_repeat
from ackbone.store.outcomes import Letter
from ackbone.store.tables import GrantedRuns, KeyRows, LaneRows, QuotaRows, TaskRows

from .delivery_rows import PostgresDeliveryRows
from .granted_runs import PostgresGrantedRuns, UnsureRuns
from .key_rows import PostgresKeyRows, PostgresLaneRows, PostgresQuotaRows
from .sql import SQL
from .task_rows import PostgresTaskRows

T = TypeVar("T")
Op = Callable[["Tx"], Awaitable[T]]

REPEATS = 8
MUCH = 64_000
"""Above this many characters of values, a socket may not take them all at once."""
_BEGIN = "SELECT clock_timestamp(), (SELECT state FROM workers WHERE worker_id = $1)"
_BEGIN_LOSSY = f"{_BEGIN}, set_config('synchronous_commit', 'off', true)"
_HOLD_DELIVERIES = "SELECT 1 FROM pg_advisory_xact_lock(7310579635104523)"
"""Every transaction that moves deliveries holds this lock, so that a lane has one delivery that is
being sent and a limit is counted once."""
_SYNCED = "SET LOCAL synchronous_commit TO DEFAULT"
"""Undoes `_BEGIN_LOSSY`: the commit reads the setting last."""


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
        values = [parameter(value) for value in values]
        self._unsent += sum([len(value) for value in values if isinstance(value, str | bytes)])
        cursor = AsyncRawCursor(self._conn)
        return await cursor.execute(statement, values, prepare=True, binary=True)


Committer = Callable[[Tx, Callable[[], Awaitable[None]]], Awaitable[None]]
"""A function that gets a transaction that is ready, and the function that commits it."""


class Database(Connections):
    """The transactions of one process."""

    def __init__(self, address: Address, clock: Clock | None = None) -> None:
        super().__init__(address, clock)
        self._writers = asyncio.Semaphore(WRITERS)
        self.unsure = UnsureRuns(self.end_lost)

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


class _Unknown(Exception):
    """COMMIT was sent, and its answer was lost."""

    def __init__(self, why: BaseException) -> None:
        super().__init__(str(why))
        self.why = why
