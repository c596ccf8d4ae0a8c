"""The roll of workers: who is there, who shows no sign of life, what becomes of their work."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterable, Mapping

from ackbone.core.errors import StoreError
from ackbone.core.machine import this_machine
from ackbone.core.store import Offers, Reclaimed, Worker
from ackbone.sqlite.faults import translate
from ackbone.sqlite.file import TURN_WAIT_S, SqliteFile
from ackbone.sqlite.liveness import Beat, forget, is_alive
from ackbone.store.fleet import offers_text

from . import reaper
from .ledger import Ledger


class Roll:
    """Rows of `workers`, each with a locked file beside the database while its process lives."""

    def __init__(self, file: SqliteFile, ledger: Ledger) -> None:
        self._file = file
        self._clock = file.clock
        self._ledger = ledger
        self._beats: dict[int, Beat] = {}
        self._lock = threading.Lock()
        """Beats are given by a thread of their own: a busy event loop must not look dead."""
        self._looked: float | None = None
        self._late = -math.inf
        """When a look for the dead last came late: this process stood still before it."""
        self._seen: set[int] = set()
        """Workers that were alive at the last look, and those of this process."""

    def close(self) -> None:
        with self._lock:
            for beat in self._beats.values():
                beat.close()
            self._beats.clear()

    async def register(self, name: str, offers: Offers | None, parent: str | None) -> Worker:
        made: list[int] = []

        def op(conn: sqlite3.Connection) -> Worker:
            cursor = conn.execute(
                "INSERT INTO workers (name, state, started_at, offers, machine, parent)"
                " VALUES (?, 'alive', ?, ?, ?, ?)",
                (name, self._clock.now_us(), offers_text(offers), this_machine(), parent),
            )
            worker_id = cursor.lastrowid or 0
            # Locked before the row can be seen: no reaper may find it without its sign of life.
            with self._lock:
                if worker_id not in self._beats:  # it is there if this is undone and run again
                    self._beats[worker_id] = Beat(self._file.workers_folder, worker_id, self._clock)
            made.append(worker_id)
            return Worker(worker_id=worker_id, name=name, offers=offers)

        try:
            worker = await self._file.write(op, within_s=TURN_WAIT_S)
        except StoreError:
            for worker_id in made:  # not committed: the number goes to whoever asks next
                self.stop_beat(worker_id)
            raise
        self.beat(worker)  # the commit may have taken longer than a lease
        self._ledger.begin(worker.worker_id)
        self._seen.add(worker.worker_id)
        return worker

    def announce(self, conn: sqlite3.Connection, worker: Worker, offers: Offers) -> None:
        conn.execute(
            "UPDATE workers SET offers = ? WHERE worker_id = ?",
            (offers_text(offers), worker.worker_id),
        )

    async def leave(self, worker: Worker, *, running: bool) -> None:
        if running:
            await self._file.write(lambda conn: _leaving(conn, worker))
            return
        await self._file.write(lambda conn: self._left(conn, worker))
        self.stop_beat(worker.worker_id)

    def _left(self, conn: sqlite3.Connection, worker: Worker) -> None:
        now, number = self._clock.now_us(), worker.worker_id
        conn.execute(
            "UPDATE workers SET state = 'left', ended_at = ? WHERE worker_id = ?"
            " AND state IN ('alive', 'leaving')",
            (now, number),
        )
        if reaper.hand_back(conn, self._ledger, number, number, now):
            self._file.wake_after_commit()
        conn.execute("UPDATE sources SET worker_id = NULL WHERE worker_id = ?", (number,))
        if self._ledger.is_blank(number):  # see prune.py for who is kept, and why
            conn.execute("DELETE FROM workers WHERE worker_id = ? AND state = 'left'", (number,))

    def beat(self, worker: Worker) -> None:
        """Raises StoreUnavailable if it could not be given."""
        self._file.report_long_wait()
        with self._lock:
            beat = self._beats.get(worker.worker_id)
            if beat is not None:
                try:
                    beat.beat()
                except OSError as error:
                    raise translate(error, self._file.path) from error

    def stop_beat(self, worker_id: int) -> None:
        """From now on it looks as dead as after a kill."""
        with self._lock:
            beat = self._beats.pop(worker_id, None)
        if beat is not None:
            beat.close()

    def is_registered(self, worker: Worker) -> bool:
        return self._file.read_sync(lambda conn: is_present_in(conn, worker.worker_id))

    async def is_someone_missing(self, me: Worker, lease_s: float) -> bool:
        """A look without the write lock: most often everyone is there."""
        now = self._clock.monotonic()
        if self._looked is not None and now - self._looked > lease_s * 2 / 3:
            self._late = now
        self._looked = now
        known = await self._file.read(lambda conn: conn.execute(reaper.PRESENT_IDS).fetchall())
        alive = {n for (n,) in known if n == me.worker_id or self._lives(n, lease_s)}
        self._seen = alive | self._seen.intersection(n for (n,) in known)
        return len(alive) < len(known)

    def reap(
        self,
        conn: sqlite3.Connection,
        me: Worker,
        lease_s: float,
        crash_budget: int,
        ended: Mapping[str, int],
    ) -> Reclaimed:
        """Give back what the dead were running. `forget` them once this is committed."""
        found = reaper.reap(
            conn,
            self._ledger,
            lambda worker_id: self._lives(worker_id, lease_s),
            seen=self._seen,
            me=me,
            crash_budget=crash_budget,
            ended=ended,
            now_us=self._clock.now_us(),
        )
        if found.tasks:
            self._file.wake_after_commit()
        return found

    def forget(self, workers: Iterable[int]) -> None:
        self._seen.difference_update(workers)
        for worker_id in workers:
            forget(self._file.workers_folder, worker_id)

    def _lives(self, worker_id: int, lease_s: float) -> bool:
        if self._clock.monotonic() - self._late < lease_s:
            # A machine that slept stopped all of them: each gets the time to beat again. Whose
            # lock is free is gone all the same.
            lease_s = math.inf
        return is_alive(self._file.workers_folder, worker_id, lease_s=lease_s, clock=self._clock)


def _leaving(conn: sqlite3.Connection, worker: Worker) -> None:
    # Its lock says when the process is gone: the reaper hands back what still runs.
    conn.execute(
        "UPDATE workers SET state = 'leaving' WHERE worker_id = ? AND state = 'alive'",
        (worker.worker_id,),
    )


def is_alive_in(conn: sqlite3.Connection, worker_id: int) -> bool:
    """May this number still claim? Not once it is leaving, left, or was declared dead."""
    return _state_in(conn, worker_id) == "alive"


def is_present_in(conn: sqlite3.Connection, worker_id: int) -> bool:
    """May this number still write? Not once it left, or was declared dead."""
    return _state_in(conn, worker_id) in ("alive", "leaving")


def _state_in(conn: sqlite3.Connection, worker_id: int) -> str | None:
    found = conn.execute("SELECT state FROM workers WHERE worker_id = ?", (worker_id,)).fetchone()
    return None if found is None else str(found[0])
