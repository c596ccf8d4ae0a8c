"""`SqliteStore`: the store on one SQLite file. Every operation runs in the writer thread."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ackbone.core.broker import Transactional
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import StoreError, StoreUnavailable
from ackbone.core.machine import this_machine
from ackbone.core.notices import Notices
from ackbone.core.outbound.subscribers import Subscribers
from ackbone.core.store import Reclaimed, Worker
from ackbone.sqlitefile.file import TURN_WAIT_S, SqliteFile, close_file, open_file
from ackbone.store import workers
from ackbone.store.base import BaseStore
from ackbone.store.outcomes import Letter
from ackbone.store.tables import GrantedRuns, KeyRows, LaneRows, QuotaRows, TaskRows
from ackbone.store.tasks import Ahead
from ackbone.store.unit import Change, Row
from ackbone.store.waiting import release_waiting

from .delivery_rows import SqliteDeliveryRows
from .key_rows import SqliteKeyRows, SqliteLaneRows, SqliteQuotaRows
from .leases import REGISTER, Leases
from .ledger import Ledger
from .sql import SQL
from .task_rows import SqliteTaskRows

_STATE = "SELECT state FROM workers WHERE worker_id = ?"


class SqliteTx:
    """`ackbone.store.unit.Tx` on the connection of the writer thread."""

    sql = SQL
    repeated = False
    """A commit on a file never loses its answer."""
    exclusive = True
    """The file has one writer at a time."""
    granted: GrantedRuns | None = None

    def __init__(self, conn: sqlite3.Connection, now_us: int) -> None:
        self.conn = conn
        self.now_us = now_us
        self.letters: dict[str, Letter] = {}
        self.if_unknown: Callable[[], None] | None = None
        self._state: str | None = None
        """The state of the worker that this transaction is for, once it was asked for."""

    @property
    def tasks(self) -> TaskRows:
        return SqliteTaskRows(self.conn, self.now_us)

    @property
    def keys(self) -> KeyRows:
        return SqliteKeyRows(self.conn, self.now_us)

    @property
    def lanes(self) -> LaneRows:
        return SqliteLaneRows(self.conn, self.now_us, self.require_alive)

    @property
    def quotas(self) -> QuotaRows:
        return SqliteQuotaRows(self.conn)

    @property
    def deliveries(self) -> SqliteDeliveryRows:
        return SqliteDeliveryRows(self.conn)

    async def rows(self, statement: str, *values: Any) -> list[Row]:
        return self.conn.execute(statement, parameters(values)).fetchall()

    async def send(self, statement: str, *values: Any) -> None:
        self.conn.execute(statement, parameters(values))

    def before_end(self, statement: str, *values: Any) -> None:
        self.conn.execute(statement, parameters(values))

    at_end = before_end

    async def moment(self) -> int:
        return self.now_us

    async def look_at_clock(self) -> None:
        """Do nothing: no other transaction was committed since this one was begun."""

    async def require_alive(self, worker_id: int, *, or_leaving: bool = False) -> None:
        if self._state is None:  # asked for each part of a batch
            found = self.conn.execute(_STATE, (worker_id,)).fetchone()
            self._state = "" if found is None else str(found[0])
        if self._state not in (("alive", "leaving") if or_leaving else ("alive",)):
            # No reaper would find what a dead id claims. The worker registers again, and asks.
            raise StoreUnavailable(f"worker {worker_id} was declared dead; nothing claimed")

    async def hold_deliveries(self) -> int:
        return self.now_us  # the file has one writer at a time


def run_now(work: Awaitable[T]) -> T:
    """Run an operation that never waits for anything."""
    try:
        next(work.__await__())
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a store operation waited for something inside a SQLite transaction")


def parameters(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A list of texts is given to SQLite as JSON."""
    if any(type(value) is list for value in values):
        return tuple(
            msgspec.json.encode(value).decode() if type(value) is list else value
            for value in values
        )
    return values


T = TypeVar("T")


class SqliteStore(BaseStore[SqliteTx]):
    """The store on one SQLite file."""

    sql = SQL
    forgets_claims = False
    """Claims are not synced, but only a power cut takes one back, and it ends the workers, too."""

    def __init__(
        self,
        path: Path,
        *,
        queue: Transactional | None = None,
        is_local: Callable[[str], bool] = lambda queue: True,
        clock: Clock | None = None,
        isolates: bool = True,
        notices: Callable[[str], Notices | None] | None = None,
        subscribers: Subscribers | None = None,
    ) -> None:
        super().__init__(
            queue=queue,
            is_local=is_local,
            isolates=isolates,
            notices=notices,
            subscribers=subscribers,
        )
        self.path = path
        self.clock = clock or SystemClock()
        self.clock_jumps = 0
        """Always 0: the worker watches the same clock."""

    async def _open(self) -> SqliteFile:
        file = await asyncio.to_thread(open_file, self.path, self.clock)
        self._ledger: Ledger = Ledger(file)
        self._leases: Leases = Leases(file)
        self._waiters: SqliteFile = file
        return file

    async def _close(self, opened: SqliteFile) -> None:
        self._leases.close()
        await asyncio.to_thread(close_file, opened)

    @property
    def file(self) -> SqliteFile:
        if self._opened is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        opened: SqliteFile = self._opened
        return opened

    def _clock_is_in_doubt(self) -> bool:
        return self.file.clock_in_doubt

    # -- workers ----------------------------------------------------------------------------------

    async def _register(self, name: str, offers: str | None, parent: str | None) -> int:
        made: list[int] = []

        async def op(tx: SqliteTx, change: Change) -> int:
            values = (name, offers, parent, this_machine(), tx.now_us)
            ((worker_id,),) = await tx.rows(REGISTER, *values)
            made.append(worker_id)
            self._leases.hold(worker_id)
            return int(worker_id)

        try:
            worker_id = await self.write_once(op, worker_id=0)
        except StoreError:
            for number in made:  # not committed: another worker may get the id
                self._leases.release(number)
            raise
        self._leases.begin(Worker(worker_id=worker_id, name=name))
        self._ledger.begin(worker_id)
        return worker_id

    async def leave(self, worker: Worker, *, running: bool = False) -> None:
        await super().leave(worker, running=running)
        if not running:
            self._leases.release(worker.worker_id)

    async def reap(self, *, worker: Worker, **how: Any) -> Reclaimed:
        found = await super().reap(worker=worker, **how)
        self._leases.forget(found.workers)
        return found

    async def _missing(
        self, me: Worker, lease_s: float, ended: Mapping[str, int]
    ) -> Callable[[SqliteTx], Awaitable[Sequence[workers.Gone]]] | None:
        if not await self._leases.is_someone_missing(me, lease_s):
            return None

        async def missing(tx: SqliteTx) -> Sequence[workers.Gone]:
            return self._leases.missing(tx.conn, me, lease_s)

        return missing

    # -- claim ------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return self.clock.now_us()

    def _ahead(self) -> Ahead:
        return Ahead(self.clock.now_us() - int(self.clock.monotonic() * 1e6))

    # -- wake-ups ---------------------------------------------------------------------------------

    def subscribe_to(self, *topics: str) -> asyncio.Event:
        return self.file.subscribe(*(topic.encode() for topic in topics))

    def _wake_here(self, topics: str) -> None:
        self.file._set_waiters(topics.encode())

    # -- the transaction --------------------------------------------------------------------------

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """One statement by itself."""
        return await self.file.read(
            lambda conn: conn.execute(statement, parameters(values)).fetchall()
        )

    async def read_due(self, statement: str, *values: Any) -> list[Row]:
        """See `BaseStore.read_due`. The statement takes the time as its last parameter."""
        file = self.file

        def op(conn: sqlite3.Connection) -> list[Row]:
            conn.execute("BEGIN")  # one snapshot for the time and the rows
            try:
                given = (*parameters(values), file.now_us(conn))
                return conn.execute(statement, given).fetchall()
            finally:
                conn.execute("ROLLBACK")

        return await file.read(op)

    async def write_once(
        self, op: Callable[[SqliteTx, Change], Awaitable[T]], *, worker_id: int
    ) -> T:
        """See `BaseStore.write_once`. The operation gives up if its turn does not come soon."""
        result, change = await self._transact(
            op, worker_id=worker_id, durable=True, within_s=TURN_WAIT_S
        )
        await self._committed(change, worker_id)
        return result

    async def _transact(
        self,
        op: Callable[[SqliteTx, Change], Awaitable[T]],
        *,
        worker_id: int,
        durable: bool,
        within_s: float | None = None,
    ) -> tuple[T, Change]:
        file, ledger, change = self.file, self._ledger, Change()

        async def work(tx: SqliteTx) -> T:
            result = await op(tx, change)

            async def append() -> None:
                ledger.write(tx.conn, worker_id, change.entries, tx.now_us)

            await self._conclude(tx, change, append)
            return result

        def run(conn: sqlite3.Connection) -> T:
            nonlocal change
            change = Change()  # it may be undone and run again
            result = run_now(work(SqliteTx(conn, self.clock.now_us())))
            if change.durable:
                file.sync_commit()
            for topic in change.topics:
                file.wake_after_commit(topic.encode())
            return result

        result = await file.write(run, durable=durable, within_s=within_s)
        return result, change

    async def _pass_on(self, tx: SqliteTx, change: Change) -> None:
        await release_waiting(tx, change, change.keys, change.lanes)
