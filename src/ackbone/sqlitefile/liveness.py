"""Signs of life of workers, without the wall clock and without writing to the database.

Each worker holds a lock on its own small file and writes the machine's uptime into it. A free lock
means that the worker is dead, which is known at once. A held lock with an old beat means that the
worker is suspended or blocked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Collection
from pathlib import Path

from ackbone.core.clock import Clock
from ackbone.core.machine import boot_id

_FORM = struct.Struct("<d16s40x")
_SETTLED_S = 60.0
"""A younger file may belong to a worker that has created and not yet locked it."""


class Beat:
    """This worker's sign of life. Its disk space is taken at the start, so it beats on a full
    disk."""

    def __init__(self, folder: Path, worker_id: int, clock: Clock) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._path = folder / str(worker_id)
        self._clock = clock
        self._boot = boot_id()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.beat()
        except OSError:  # no room: the next worker gets this id, so its file must be free
            self.close()
            raise

    def beat(self) -> None:
        """Write the current uptime. Never blocks, and never fails because the disk is full."""
        os.pwrite(self._fd, _FORM.pack(self._clock.monotonic(), self._boot), 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._fd)


def is_alive(folder: Path, worker_id: int, *, lease_s: float, clock: Clock) -> bool:
    """Return False if its lock is free (dead) or its beat is older than the lease (suspended)."""
    try:
        fd = os.open(folder / str(worker_id), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            data = os.pread(fd, _FORM.size, 0)
            if len(data) < _FORM.size:
                return True
            beat, boot = _FORM.unpack(data)
            return bool(boot == boot_id() and clock.monotonic() - beat <= lease_s)
        return False
    finally:
        os.close(fd)


def forget(folder: Path, worker_id: int) -> None:
    """Remove the file of a dead worker."""
    with contextlib.suppress(OSError):
        (folder / str(worker_id)).unlink()


def sweep(folder: Path, known: Collection[int]) -> int:
    """Remove the files of workers that are not `known` to be alive. Returns how many."""
    removed = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if not entry.name.isdigit() or int(entry.name) in known:
                continue
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > _SETTLED_S:
                    removed += _remove_unlocked(entry.path)
    return removed


def _remove_unlocked(path: str) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
