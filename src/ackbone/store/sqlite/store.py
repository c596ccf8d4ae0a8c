"""`SqliteStore`: the store on one SQLite file. Every operation runs in the writer thread."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ackbone.core.broker import Notices, Subscription, Transactional
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import StoreError, StoreUnavailable
from ackbone.core.machine import this_machine
from ackbone.core.outbound.subscribers import Subscribers
from ackbone.core.store import (
    Reclaimed,
    Worker,
)
from ackbone.sqlitefile.file import TURN_WAIT_S, SqliteFile, close_file, open_file
from ackbone.store import workers
from ackbone.store.claim_store import ClaimStore
from ackbone.store.fleet import GRACE_S
from ackbone.store.keys import release_waiting
from ackbone.store.tasks import Ahead
from ackbone.store.unit import OUTGOING, WORK, Change, Row, run_now

from .leases import REGISTER, Leases, is_present_in
from .ledger import Ledger
from .queue_rows import next_due
from .sql import SQL
from .task_rows import OFFERS
from .tx import SqliteTx, parameters

T = TypeVar("T")


class SqliteStore(ClaimStore[SqliteTx]):
    """The store on one SQLite file.

    `queue` is the broker on the same file, if there is one: taking a message and claiming it is one
    commit then. `is_local` returns True for the queues of that broker.
    """

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
        super().__init__(isolates=isolates, notices=notices, subscribers=subscribers)
        self.path = path
        self.clock = clock or SystemClock()
        self._queue = queue
        self._is_local = is_local
        self._opened: SqliteFile | None = None
        self.clock_jumps = 0
        """Always 0: the worker watches the same clock."""

    async def open(self) -> None:
        if self._opened is None:
            file = await asyncio.to_thread(open_file, self.path, self.clock)
            self._ledger = Ledger(file)
            self._leases = Leases(file)
            self._opened = file

    async def close(self) -> None:
        if self._opened is not None:
            file, self._opened = self._opened, None
            self._leases.close()
            await asyncio.to_thread(close_file, file)

    @property
    def file(self) -> SqliteFile:
        if self._opened is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        return self._opened

    def holds(self, queue: str) -> bool:
        return self._queue is not None and self._is_local(queue)

    def _clock_is_in_doubt(self) -> bool:
        return self._opened is not None and self._opened.clock_in_doubt

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

    def beat(self, worker: Worker) -> None:
        self._leases.beat(worker)

    def is_registered(self, worker: Worker) -> bool:
        return self.file.read_sync(lambda conn: is_present_in(conn, worker.worker_id))

    async def reap(
        self,
        *,
        worker: Worker,
        lease_s: float,
        crash_budget: int,
        ended: Mapping[str, int] | None = None,
    ) -> Reclaimed:
        if not await self._leases.is_someone_missing(worker, lease_s):
            return Reclaimed()

        async def op(tx: SqliteTx, change: Change) -> Reclaimed:
            missing = self._leases.missing(tx.conn, worker, lease_s)
            return await workers.reap(
                tx, change, missing, me=worker, crash_budget=crash_budget, ended=ended or {}
            )

        found = await self.write(op, worker_id=worker.worker_id)
        self._leases.forget(found.workers)
        self._fleet.forget()
        return found

    def _is_blank(self, worker_id: int) -> bool:
        return self._ledger.is_blank(worker_id)

    async def _offers(self) -> Sequence[Row]:
        return await self.read(OFFERS, int(GRACE_S * 1e6), self.clock.now_us())

    # -- claim ------------------------------------------------------------------------------------

    async def next_due_s(self, sub: Subscription) -> float | None:
        now = self.clock.now_us()
        due = await self.file.read(lambda conn: next_due(conn, sub.name, now))
        return None if due is None else max(0.0, (due - now) / 1e6)

    def _ahead(self) -> Ahead:
        return Ahead(self.clock.now_us() - int(self.clock.monotonic() * 1e6))

    # -- wake-ups ---------------------------------------------------------------------------------

    def subscribe_to(self, *topics: str) -> asyncio.Event:
        return self.file.subscribe(*(topic.encode() for topic in topics))

    def unsubscribe(self, event: asyncio.Event) -> None:
        if self._opened is not None:
            self._opened.unsubscribe(event)

    def look_again(self) -> None:
        """Wake everything in this process that waits for due work: the clock was moved."""
        if self._opened is not None:
            self._opened._set_waiters((WORK + OUTGOING).encode())

    # -- the transaction --------------------------------------------------------------------------

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """One statement by itself."""
        return await self.file.read(
            lambda conn: conn.execute(statement, parameters(values)).fetchall()
        )

    async def read_due(self, statement: str, *values: Any) -> list[Row]:
        """See `UnitOfWork.read_due`. The statement takes the time as its last parameter."""
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
        """See `UnitOfWork.write_once`. The operation gives up if its turn does not come soon."""
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
            result = run_now(work(SqliteTx(conn, self.clock.now_us(), self._queue, self.holds)))
            if change.durable:
                file.sync_commit()
            for topic in change.topics:
                file.wake_after_commit(topic.encode())
            return result

        result = await file.write(run, durable=durable, within_s=within_s)
        return result, change

    async def _pass_on(self, tx: SqliteTx, change: Change) -> None:
        await release_waiting(tx, change, change.keys, change.lanes)
