"""Leases of workers: a locked file for each, beside the database, as long as its process lives."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterable

from ackbone.core.machine import this_machine
from ackbone.core.store import Worker
from ackbone.sqlitefile.faults import translate
from ackbone.sqlitefile.file import SqliteFile
from ackbone.sqlitefile.sharing import Beat, forget, is_alive
from ackbone.store.workers import Gone

REGISTER = (
    "INSERT INTO workers (name, offers, parent, machine, started_at, state)"
    " VALUES (?1, ?2, ?3, ?4, ?5, 'alive') RETURNING worker_id"
)
_PRESENT = "FROM workers WHERE state IN ('alive', 'leaving')"


class Leases:
    """The leases that this process holds, and what it knows about those of other processes."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._clock = file.clock
        self._beats: dict[int, Beat] = {}
        self._lock = threading.Lock()
        """A thread of its own renews leases, so that a busy event loop does not look dead."""
        self._looked: float | None = None
        self._late = -math.inf
        """When a look for dead workers last came late: this process was suspended before it."""
        self._seen: set[int] = set()
        """Workers that were alive at the last look, and those of this process."""

    def close(self) -> None:
        with self._lock:
            for beat in self._beats.values():
                beat.close()
            self._beats.clear()

    def hold(self, worker_id: int) -> None:
        """Lock the file of a worker, before its row is committed: a reaper that finds the row must
        find the lock as well."""
        with self._lock:
            if worker_id not in self._beats:  # the transaction may be undone and run again
                self._beats[worker_id] = Beat(self._file.workers_folder, worker_id, self._clock)

    def begin(self, worker: Worker) -> None:
        """The row of a worker is committed."""
        self.beat(worker)  # the commit may have taken longer than a lease
        self._seen.add(worker.worker_id)

    def beat(self, worker: Worker) -> None:
        """Renew a lease. Raises StoreUnavailable if that is not possible."""
        self._file.report_long_wait()
        with self._lock:
            beat = self._beats.get(worker.worker_id)
            if beat is not None:
                try:
                    beat.beat()
                except OSError as error:
                    raise translate(error, self._file.path) from error

    def is_present(self, worker: Worker) -> bool:
        """Return True if the worker may write: it has not left and was not declared dead."""
        state = "SELECT state FROM workers WHERE worker_id = ?"
        return self._file.read_sync(
            lambda conn: conn.execute(state, (worker.worker_id,)).fetchone()
        ) in (("alive",), ("leaving",))

    def release(self, worker_id: int) -> None:
        """Free the lock. From now on the worker looks as dead as after a kill."""
        with self._lock:
            beat = self._beats.pop(worker_id, None)
        if beat is not None:
            beat.close()

    async def is_someone_missing(self, me: Worker, lease_s: float) -> bool:
        """Look without the write lock: usually every worker is there."""
        now = self._clock.monotonic()
        if self._looked is not None and now - self._looked > lease_s * 2 / 3:
            self._late = now
        self._looked = now
        known = await self._file.read(
            lambda conn: conn.execute(f"SELECT worker_id {_PRESENT}").fetchall()
        )
        alive = {n for (n,) in known if n == me.worker_id or self._lives(n, lease_s)}
        self._seen = alive | self._seen.intersection(n for (n,) in known)
        return len(alive) < len(known)

    def missing(self, conn: sqlite3.Connection, me: Worker, lease_s: float) -> list[Gone]:
        """The workers whose lease is over, and what is known about their machine.

        The file is on one machine. Whether other workers of that machine live is therefore whether
        this process belongs to the same boot.
        """
        present = conn.execute(f"SELECT worker_id, state, name, machine, parent {_PRESENT}")
        rows = present.fetchall()
        parents = {worker_id: parent for worker_id, _, _, _, parent in rows}
        living = {n for n in parents if n == me.worker_id or self._lives(n, lease_s)}
        alive_parents = {Worker(worker_id=n).as_parent for n in living}
        return [
            Gone(
                worker_id,
                state,
                name,
                parent,
                parent_lives=parent in alive_parents,
                machine_lives=here,
                sibling_lives=here and parent is not None and parent == parents.get(me.worker_id),
                outlived=here and (worker_id > me.worker_id or worker_id in self._seen),
            )
            for worker_id, state, name, machine, parent in rows
            if worker_id not in living
            for here in [machine == this_machine()]
        ]

    def forget(self, workers: Iterable[int]) -> None:
        """Remove what dead workers left, after their death is committed."""
        self._seen.difference_update(workers)
        for worker_id in workers:
            forget(self._file.workers_folder, worker_id)

    def _lives(self, worker_id: int, lease_s: float) -> bool:
        if self._clock.monotonic() - self._late < lease_s:
            # A machine that slept suspended all workers. Each gets time to renew its lease; a
            # worker whose lock is free is dead all the same.
            lease_s = math.inf
        return is_alive(self._file.workers_folder, worker_id, lease_s=lease_s, clock=self._clock)
