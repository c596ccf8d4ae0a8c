"""Processes that hold locks on a database file, as Linux shows them in /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ackbone.core.secret import mask_line

_LOCKS = Path("/proc/locks")
_PROC = Path("/proc")
_STOPPED = "Tt"
"""States of a process in /proc/PID/stat: stopped by a signal, stopped by a debugger."""
_MAX_COMMAND = 80

# Bytes of the `-shm` file that SQLite locks (see "WAL-Index File Format" in its documentation).
_WRITE_LOCK = 120
_READ_LOCKS = 123
_READERS = 5
_READ_MARKS = 100


class Holder(NamedTuple):
    """A process that holds a lock."""

    pid: int
    command: str
    stopped: bool

    def __str__(self) -> str:
        name = f"process {self.pid} ({self.command})" if self.command else f"process {self.pid}"
        return "this process" if self.pid == os.getpid() else name


def who_writes(path: Path) -> Holder | None:
    """Return the process that keeps others from writing, or None if it cannot be seen.

    Processes that only wait for their turn hold the gate, so the order of the three locks matters,
    unless one of the processes is stopped. This process is left out: it may be waiting itself.
    """
    found = _held_by(Path(f"{path}-shm"), "POSIX", range(_WRITE_LOCK, _WRITE_LOCK + 1))
    for part in ("lock", "gate"):
        found += _held_by(Path(f"{path}.{part}"), "FLOCK")
    others = [_look(pid) for pid in found if pid != os.getpid()]
    return next((each for each in others if each.stopped), others[0] if others else None)


def who_upgrades(lock: Path) -> Holder | None:
    """Return the process that holds the lock for schema upgrades, or None if it cannot be seen."""
    return next((_look(pid) for pid in _held_by(lock, "FLOCK") if pid != os.getpid()), None)


def why_no_turn(path: Path) -> str:
    """Name the process that keeps others from writing, and say what to do, in two sentences."""
    holder = who_writes(path)
    if holder is None:
        return (
            "Another process holds its write lock, but cannot be seen from here (it may run in "
            f"another container). 'fuser -v {path}.lock', run on the host, names it"
        )
    return f"Its write lock is held by {holder}{_what_to_do(holder)}"


def _what_to_do(holder: Holder) -> str:
    if holder.stopped:
        return (
            f", which is stopped (state T). Let it continue with 'kill -CONT {holder.pid}', or end "
            f"it with 'kill -KILL {holder.pid}': what it has not committed is undone"
        )
    return f". Wait for it, or end it with 'kill {holder.pid}'"


def who_reads_since(path: Path, shm: bytes, *, behind: int) -> Sequence[Holder]:
    """Return processes whose read transaction began at least `behind` pages of the log ago.

    `shm`: the first bytes of the `-shm` file. SQLite cannot start the log over while they read.
    """
    last = int.from_bytes(shm[16:20], "little")
    found: list[int] = []
    for slot in range(_READERS):
        at = _READ_MARKS + 4 * slot
        if int.from_bytes(shm[at : at + 4], "little") + behind <= last:
            lock = _READ_LOCKS + slot
            found += _held_by(Path(f"{path}-shm"), "POSIX", range(lock, lock + 1))
    return [_look(pid) for pid in dict.fromkeys(found)]


def _held_by(file: Path, kind: str, span: range | None = None) -> list[int]:
    """Return processes that hold a lock of this kind on the file, or on these bytes of it."""
    try:
        inode = os.stat(file).st_ino
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split()
        # "1: FLOCK ADVISORY WRITE 4242 fe:00:9979762 0 EOF". A waiting one begins with "->".
        if len(fields) < 8 or fields[1] != kind or fields[5].rpartition(":")[2] != str(inode):
            continue
        first, last = int(fields[6]), fields[7]
        covers = span is None or (first < span.stop and (last == "EOF" or int(last) >= span.start))
        if covers and int(fields[4]) > 0:
            found.append(int(fields[4]))
    return found


def _look(pid: int) -> Holder:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        state = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return Holder(pid, "", stopped=False)
    words[0] = words[0].rpartition(b"/")[2]
    command = b" ".join(words).decode(errors="replace").strip()
    return Holder(pid, mask_line(command)[:_MAX_COMMAND], stopped=state in _STOPPED)
