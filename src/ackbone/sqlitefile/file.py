"""The file and its writer thread. Operations that arrive during a transaction become the next
one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import StoreCorrupt, StoreUnavailable

from .faults import is_full, refuse_network, translate
from .sharing import OUTGOING, WORK, Turnstile, Wake, no_turn, sweep, who_writes, why_no_turn
from .timebase import TimeBase
from .wal import Witness, WriteAheadLog

T = TypeVar("T")
Op = Callable[[sqlite3.Connection], T]

log = logging.getLogger("ackbone.sqlite")

MAX_JOBS = 64
TURN_WAIT_S = 10.0
"""How long a command, or a worker that registers, waits for its turn to write."""
LONG_WAIT_S = 5.0
"""After waiting this long for its turn to write, a worker logs which process holds the lock."""
CLOSE_WAIT_S = 3.0
"""How long the last user of a file waits, when it closes the file, to write pending operations."""
UNWANTED_WAIT_S = 1.0
"""The same, if the callers of all pending operations were cancelled."""
LOG_LIMIT = 64 * 1024 * 1024
"""Size in bytes to which SQLite cuts the log's file when it starts it over."""
IDLE_READERS = 2
_FULL, _NORMAL = "FULL", "NORMAL"


class _NoTurn(Exception):
    """An operation was withdrawn, because its transaction did not get its turn in time."""


class _Job:
    __slots__ = ("durable", "error", "future", "loop", "op", "result")

    def __init__(
        self,
        op: Op[Any],
        durable: bool,
        future: asyncio.Future[Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.op = op
        self.durable = durable
        self.future = future
        self.loop = loop
        self.result: Any = None
        self.error: BaseException | None = None


class SqliteFile:
    """One database file in this process. `open_file` makes it, and shares it by path."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.clock = clock
        self.workers_folder = Path(f"{path}.workers")
        self._turnstile = Turnstile(path)
        self._witness = Witness(path)
        self._wake = Wake(path)
        self._time = TimeBase(clock)
        self._users = 0
        self._jobs: list[_Job] = []
        self._ready = threading.Condition()
        self._closing = False
        self._wake_wanted = b""
        self._sync_wanted = False
        self._sync = ""
        self._commits = 0
        self._log = WriteAheadLog(path)
        self._turn: list[_Job] = []
        """The jobs of the transaction that runs or waits for its turn."""
        self._waits_since: float | None = None
        """When the writer thread began to wait for its turn. None while it does not wait."""
        self._given_up = False
        self._held_up = False
        self._waiters: dict[bytes, weakref.WeakSet[asyncio.Event]] = {
            WORK: weakref.WeakSet(),
            OUTGOING: weakref.WeakSet(),
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ledger_head = b""
        self._rollback_hooks: list[Callable[[], None]] = []
        self._readers: list[sqlite3.Connection] = []
        try:
            self._conn = self._connect()
        except BaseException:
            self._close_handles()
            raise
        self._thread = threading.Thread(
            target=self._run, name=f"ackbone-writer:{path.name}", daemon=True
        )
        self._thread.start()

    # -- for callers ---------------------------------------------------------------------------

    async def write(self, op: Op[T], *, durable: bool = True, within_s: float | None = None) -> T:
        """Run `op` in the next transaction. Returns after the commit (synced, if `durable`).

        `op` may be undone and run again: if another operation of the transaction fails or calls
        `sync_commit`, or if somebody sets the clock meanwhile. Cancelling the caller does not stop
        the operation.
        `within_s`: if the transaction does not get its turn in time, `op` is withdrawn, and
        StoreUnavailable names the process that holds the lock.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        job = _Job(op, durable, future, loop)
        self._submit(job)
        if within_s is None:
            return await future
        # Not `asyncio.wait`, which costs one more turn of the loop for every batch of sends.
        timer = loop.call_later(within_s, self._time_out, job)
        try:
            return await future
        except _NoTurn:
            why = await asyncio.to_thread(no_turn, self.path, within_s)
            raise StoreUnavailable(f"{why}. Nothing was written") from None
        finally:
            timer.cancel()

    def read_sync(self, op: Op[T]) -> T:
        """Run `op` on a read-only connection of its own, which sees committed rows."""
        kept = False
        try:
            conn = self._reader()
        except sqlite3.DatabaseError as error:  # for example, no file handle is left
            raise translate(error, self.path) from error
        try:
            result = op(conn)
            kept = not conn.in_transaction and not self._closing
        except sqlite3.DatabaseError as error:
            raise translate(error, self.path) from error
        finally:
            if kept and len(self._readers) < IDLE_READERS:
                self._readers.append(conn)
            else:
                conn.close()
        return result

    def _reader(self) -> sqlite3.Connection:
        """Return a connection, a used one if possible: opening one takes a millisecond."""
        with contextlib.suppress(IndexError):
            return self._readers.pop()
        conn = sqlite3.connect(
            f"file:{_quoted(self.path)}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=5,
        )
        add_functions(conn)
        return conn

    async def read(self, op: Op[T]) -> T:
        """`read_sync` off the loop."""
        return await asyncio.to_thread(self.read_sync, op)

    def wake_after_commit(self, topic: bytes = WORK) -> None:
        """Called inside an operation: wake the readers of this topic after the commit."""
        if topic not in self._wake_wanted:
            self._wake_wanted += topic

    def sync_commit(self) -> None:
        """Called inside an operation that need not be durable: this commit must be synced after
        all.

        SQLite cannot change that within a transaction, so it is undone and run again as a synced
        one.
        """
        self._sync_wanted = True

    @property
    def clock_in_doubt(self) -> bool:
        """True if somebody set the wall clock moments ago: nothing may expire by it."""
        return self._time.in_doubt

    @property
    def clock_was_set(self) -> bool:
        """True if due times have not moved with the clock yet. The next transaction moves them
        first."""
        return self._time.was_set()

    def now_us(self, conn: sqlite3.Connection) -> int:
        """Return the time for a reader, by the clock that the due times of `conn` refer to."""
        return self._time.now_us(conn)

    def on_rollback(self, hook: Callable[[], None]) -> None:
        """Call `hook` in the writer thread whenever a write was undone."""
        self._rollback_hooks.append(hook)

    def subscribe(self, *topics: bytes) -> asyncio.Event:
        """Return an event of the running loop that is set when any process has made new work.

        `topics` may ask for replies and follow-ups instead.
        """
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        for topic in topics or (WORK,):
            self._waiters[topic].add(event)
        if self._loop is not loop:
            self._loop = loop
            listener = self._wake.listen()
            if listener is not None:
                loop.add_reader(listener.fileno(), self._woken)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        for waiters in self._waiters.values():
            waiters.discard(event)
        if not any(self._waiters.values()) and self._loop is not None:
            listener = self._wake.listen()
            if listener is not None and not self._loop.is_closed():
                self._loop.remove_reader(listener.fileno())
            self._loop = None

    def report_long_wait(self) -> None:
        """Log that this process has waited long for its turn to write, and when that is over."""
        since = self._waits_since
        waited = 0.0 if since is None else time.monotonic() - since
        if waited >= LONG_WAIT_S and not self._held_up:
            self._held_up = True
            log.warning("%s. This process keeps waiting", no_turn(self.path, round(waited)))
        elif waited < LONG_WAIT_S and self._held_up:
            self._held_up = False
            log.warning("%s can be written again", self.path)

    def tidy(self, alive: Collection[int]) -> int:
        """Remove files that dead processes left, given the workers that are alive."""
        return sweep(self.workers_folder, alive) + self._wake.sweep()

    # -- the writer thread ------------------------------------------------------------------------

    def _submit(self, job: _Job) -> None:
        with self._ready:
            if self._closing:
                raise StoreUnavailable(f"{self.path} is closed")
            self._jobs.append(job)
            self._ready.notify()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._jobs and not self._closing:
                    self._ready.wait()
                self._turn, self._jobs = self._jobs[:MAX_JOBS], self._jobs[MAX_JOBS:]
                if not self._turn and self._closing:
                    return
                self._waits_since = time.monotonic()
            try:
                self._transaction(self._turn)
            except BaseException as error:
                translated = translate(error, self.path)
                for job in self._turn:
                    job.error = job.error or translated
            self._waits_since = None
            if self._given_up:
                self._close_all()
                return
            self._answer(self._turn)

    def _time_out(self, job: _Job) -> None:
        """Withdraw an operation whose time is over, unless it has begun."""
        if not job.future.done() and self._withdraw(job):
            job.future.set_exception(_NoTurn())

    def _withdraw(self, job: _Job) -> bool:
        """Withdraw an operation. Returns False if it has begun."""
        with self._ready:
            waiting = self._jobs if job in self._jobs else self._turn
            if job not in waiting or (waiting is self._turn and self._waits_since is None):
                return False
            waiting.remove(job)
            return True

    def _transaction(self, jobs: list[_Job]) -> None:
        # A copy: if one is withdrawn meanwhile, the loop would skip the next one.
        durable = any(job.durable for job in tuple(jobs))
        conn = self._conn
        with self._turnstile:
            try:
                self._run_all(conn, jobs, durable)
                while self._time.was_set() or (self._sync_wanted and not durable):
                    durable = durable or self._sync_wanted
                    self._undo(conn)
                    self._run_all(conn, jobs, durable)
                if durable:
                    ((self._commits,),) = conn.execute(
                        "UPDATE witness SET commits = commits + 1 RETURNING commits"
                    )
                conn.execute("COMMIT")
            except BaseException:
                self._undone()
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
                raise
            self._after_commit(conn, durable)
        if self._wake_wanted:
            self._wake.ring(self._wake_wanted)

    def _after_commit(self, conn: sqlite3.Connection, durable: bool) -> None:
        """Nothing here may raise: the caller would repeat what is already committed."""
        self._time.committed()
        try:
            if durable:
                self._witness.write(self._commits, self.ledger_head)
            self._log.checkpoint_if_long(conn)
        except (sqlite3.Error, OSError) as error:
            log.warning("%s: committed, but not checkpointed: %s", self.path, error)

    def _run_all(self, conn: sqlite3.Connection, jobs: list[_Job], durable: bool) -> None:
        level = _FULL if durable else _NORMAL
        if level != self._sync:
            conn.execute(f"PRAGMA synchronous={level}")
            self._sync = level
        self._begin(conn)
        if not self._try_all(conn, jobs):
            self._undo(conn)
            self._begin(conn)
            for job in jobs:
                self._savepoint(conn, job)

    def _undo(self, conn: sqlite3.Connection) -> None:
        conn.execute("ROLLBACK")
        self._undone()

    def _begin(self, conn: sqlite3.Connection) -> None:
        self._wake_wanted = b""
        self._sync_wanted = False
        conn.execute("BEGIN IMMEDIATE")
        with self._ready:  # from here on no operation can be withdrawn
            self._waits_since = None
        self._time.follow(conn)

    def _try_all(self, conn: sqlite3.Connection, jobs: list[_Job]) -> bool:
        """Run all operations without savepoints, because most often none fails.

        Returns False if one did. Then all are undone and run again, each in a savepoint of its own.
        Savepoints copy every page, which costs a tenth of the whole.
        """
        for job in jobs:
            job.error = None  # of an earlier run
            try:
                job.result = job.op(conn)
            except BaseException as error:
                if not conn.in_transaction or is_full(error):
                    raise
                return False
        return True

    def _savepoint(self, conn: sqlite3.Connection, job: _Job) -> None:
        """Run one operation. Its failure undoes only itself, unless SQLite ended the
        transaction."""
        conn.execute("SAVEPOINT op")
        job.error = None  # of an earlier run
        try:
            job.result = job.op(conn)
        except BaseException as error:
            if not conn.in_transaction:
                raise
            conn.execute("ROLLBACK TO op")
            conn.execute("RELEASE op")
            self._undone()
            if is_full(error):
                raise
            job.error = translate(error, self.path)
            return
        conn.execute("RELEASE op")

    def _undone(self) -> None:
        for hook in self._rollback_hooks:
            hook()

    def _answer(self, jobs: list[_Job]) -> None:
        loops: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        for job in jobs:
            loops.setdefault(job.loop, []).append(job)
        waking, loop = self._wake_wanted, self._loop
        for each, theirs in loops.items():
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                each.call_soon_threadsafe(_resolve_all, theirs)
        if waking and loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._set_waiters, waking)

    def _woken(self) -> None:
        self._set_waiters(self._wake.drain())

    def _set_waiters(self, topics: bytes = WORK) -> None:
        for topic, waiters in self._waiters.items():
            if topic in topics:
                for event in waiters:
                    event.set()

    # -- the file ---------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        refuse_network(self.path)
        try:
            self._check_witness()
            conn = sqlite3.connect(
                self.path,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=512,
                timeout=30,
            )
            add_functions(conn)
            conn.execute("PRAGMA journal_mode=WAL")
            conn.execute("PRAGMA wal_autocheckpoint=0")
            conn.execute(f"PRAGMA journal_size_limit={LOG_LIMIT}")
            conn.execute("PRAGMA cache_size=-16000")
            conn.execute("PRAGMA temp_store=MEMORY")
            # Debian's SQLite overwrites deleted rows with zeros, which costs a tenth of a drain.
            conn.execute("PRAGMA secure_delete=OFF")
        except sqlite3.DatabaseError as error:
            raise translate(error, self.path) from error
        return conn

    def _check_witness(self) -> None:
        """Compare the witness with the database, without the write lock, whose holder may be
        stopped.

        Other processes may commit meanwhile. They write the witness after the commit that it
        counts, and both only grow, so a witness that is read first can never be ahead.
        """
        witnessed = self._witness.read()
        self._commits = self._count_commits()
        if witnessed is not None and witnessed > self._commits:
            gap = witnessed - self._commits
            raise StoreCorrupt(
                f"{self.path} holds {self._commits} durable commits, but {witnessed} were made: "
                f"the last {gap} went missing (its log was cut or damaged). Nothing was opened. "
                f"Restore the files from a copy, or run 'ackbone recover' to go on without them."
            )
        # A power cut may have left the witness behind. The next commit writes it anyway.
        if witnessed != self._commits and self._turnstile.try_enter():
            with contextlib.ExitStack() as held:
                held.push(self._turnstile)
                self._witness.write(self._count_commits())

    def _count_commits(self) -> int:
        # Read-only: closing a writable connection would copy the rest of a damaged log into the
        # database and delete the log, with bytes that a person could still read.
        with contextlib.closing(self._reader()) as conn:
            return int(conn.execute("SELECT commits FROM witness").fetchone()[0])

    def _close_handles(self) -> None:
        self._turnstile.close()
        self._witness.close()
        self._wake.close()
        self._log.close()

    def _close(self) -> None:
        with self._ready:
            self._closing = True
            self._ready.notify()
        begun = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if self._thread.is_alive() and self._give_up(time.monotonic() - begun):
                return
        self._close_all()

    def _give_up(self, waited_s: float) -> bool:
        """Close without writing pending operations, if their turn does not come.

        A stopped process may hold the lock, and an interrupted command must not wait for long.
        """
        holder = who_writes(self.path) if self._waits_since is not None else None
        with self._ready:
            jobs = [*self._turn, *self._jobs]
            wanted = any(not job.future.done() for job in jobs)
            stopped = holder is not None and holder.stopped
            limit = CLOSE_WAIT_S if wanted else UNWANTED_WAIT_S
            if self._waits_since is None or (waited_s < limit and not stopped):
                return False
            self._given_up = True  # the writer thread closes everything when its turn comes
            del self._turn[:], self._jobs[:]
        if wanted:
            log.warning(
                "%d operations were not written to %s before it was closed. %s",
                len(jobs),
                self.path,
                why_no_turn(self.path),
            )
        for job in jobs:
            job.error = StoreUnavailable(f"{self.path} is closed")
        self._answer(jobs)
        return True

    def _close_all(self) -> None:
        for reader in self._readers:
            reader.close()
        # No checkpoint at close: with other writers it would need a turn, and the log is read again
        # anyway.
        self._conn.close()
        self._close_handles()


_open: dict[Path, SqliteFile] = {}
_open_lock = threading.Lock()


def open_file(path: Path, clock: Clock | None = None) -> SqliteFile:
    """Return this process's `SqliteFile` for a path, whose schema must exist. See `close_file`."""
    path = path.resolve()
    with _open_lock:
        file = _open.get(path)
        if file is None:
            try:
                file = _open[path] = SqliteFile(path, clock or SystemClock())
            except OSError as error:
                raise translate(error, path) from error
        file._users += 1
        return file


def close_file(file: SqliteFile) -> None:
    """Give a file back. The last user stops the writer thread, after pending operations are
    done."""
    with _open_lock:
        file._users -= 1
        if file._users > 0:
            return
        _open.pop(file.path, None)
    file._close()


def _resolve_all(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


def add_functions(conn: sqlite3.Connection) -> None:
    """Add the functions that our statements use to a connection."""
    conn.create_function("id_of", 1, _id_of, deterministic=True)


def _id_of(text: str | None) -> bytes | None:
    """SQL function: return the 16 bytes of an id, given its text."""
    return None if text is None else uuid.UUID(text).bytes


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
