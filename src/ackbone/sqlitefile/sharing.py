"""How the processes of one file share it: whose turn it is to write, who holds a lock, which
workers are alive, and how one wakes the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ackbone.core.clock import Clock
from ackbone.core.errors import StoreUnavailable
from ackbone.core.machine import boot_id
from ackbone.core.secret import mask_line

# -- turns to write ------------------------------------------------------------------------------


class Turnstile:
    """A fair write lock between processes: `with turnstile:` holds the right to write.

    SQLite's own busy handler polls, so one of two busy writers may starve for seconds. Here the
    next writer waits inside the gate, and the one that has just written queues behind it. There is
    one turnstile per process and file. Not reentrant.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gate = os.open(f"{path}.gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._given_up = False
        self._deciding = threading.Lock()

    def __enter__(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._write, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._write, fcntl.LOCK_UN)

    def try_enter(self) -> bool:
        """Take the right to write if no process has it or waits for it. Never blocks."""
        try:
            fcntl.flock(self._gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            fcntl.flock(self._write, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        return True

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """As `with turnstile`, but raise StoreUnavailable if the turn does not come in time.

        A blocked flock cannot be given up, and a polling process would lose against waiting ones.
        So a thread of its own waits, and releases the lock if it comes too late.
        """
        came = threading.Event()
        threading.Thread(target=self._wait, args=(came,), daemon=True).start()
        came.wait(seconds)
        with self._deciding:
            self._given_up = not came.is_set()
        if self._given_up:
            raise StoreUnavailable(no_turn(self._path, seconds))
        try:
            yield
        finally:
            self.__exit__()

    def _wait(self, came: threading.Event) -> None:
        self.__enter__()
        with self._deciding:
            if not self._given_up:
                came.set()
                return
        self.__exit__()
        self._close()

    def close(self) -> None:
        """Close the lock files. A thread that still waits for them closes them itself."""
        with self._deciding:
            if self._given_up:
                return
        self._close()

    def _close(self) -> None:
        os.close(self._gate)
        os.close(self._write)


def no_turn(path: Path, seconds: float) -> str:
    """Return the error text of a write that gave up waiting for its turn."""
    return f"{path} could not be written within {seconds:g} s. {why_no_turn(path)}"


# -- holders of locks ----------------------------------------------------------------------------

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
        lines = Path("/proc/locks").read_text().splitlines()
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
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return Holder(pid, "", stopped=False)
    words[0] = words[0].rpartition(b"/")[2]
    command = b" ".join(words).decode(errors="replace").strip()
    return Holder(pid, mask_line(command)[:_MAX_COMMAND], stopped=state in _STOPPED)


# -- signs of life -------------------------------------------------------------------------------

_FORM = struct.Struct("<d16s40x")
_SETTLED_S = 60.0
"""A younger file may belong to a worker that has created and not yet locked it."""


class Beat:
    """This worker's sign of life, without the wall clock and without writing to the database.

    The worker holds a lock on a small file and writes the machine's uptime into it. A free lock
    means that the worker is dead, which is known at once. A held lock with an old beat means that
    it is suspended or blocked. The disk space is taken at the start, so it beats on a full disk.
    """

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


# -- wake-ups ------------------------------------------------------------------------------------

WORK, OUTGOING = b"w", b"o"
"""Topics of a wake-up: messages to run; replies and follow-ups to send."""
_MAX_PATH = 100
"""Longest path of a socket, in bytes."""


class Wake:
    """Wake-ups for the other processes of one file: one datagram, no polling.

    Each listening process binds a socket in `<db>.wake/`. A lost datagram costs at most a second,
    because readers also look that often by themselves. So nothing here may raise.
    """

    def __init__(self, path: Path) -> None:
        self.folder = Path(f"{path}.wake")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._dir_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        self._listener: socket.socket | None = None
        self._name = f"{os.getpid()}-{os.urandom(3).hex()}"
        self._peers: list[str] = []
        self._peers_seen = -1

    def listen(self) -> socket.socket | None:
        """Return this process's socket, which a wake-up makes readable, or None if binding
        failed."""
        if self._listener is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sock.setblocking(False)
            try:
                sock.bind(self._address(self._name))
            except OSError:
                sock.close()
                return None
            self._listener = sock
        return self._listener

    def ring(self, topics: bytes) -> None:
        """Wake every other process."""
        for name in self._others():
            try:
                self._sender.sendto(topics, self._address(name))
            except (BlockingIOError, InterruptedError):
                continue  # its buffer is full, so it has wake-ups to read
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._dir_fd)  # its process has ended

    def drain(self) -> bytes:
        """Read all wake-ups of this process. Returns their topics."""
        topics = b""
        if self._listener is not None:
            with contextlib.suppress(BlockingIOError):
                while rung := self._listener.recv(64):
                    topics += rung if rung not in topics else b""
        return topics

    def sweep(self) -> int:
        """Remove the sockets of processes that have ended. Returns how many."""
        removed = 0
        for name in self._others():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(self._address(name))  # sends nothing
                except ConnectionRefusedError:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=self._dir_fd)
                        removed += 1
                except OSError:
                    continue
        return removed

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._dir_fd)
            self._listener = None
        self._sender.close()
        os.close(self._dir_fd)

    def _others(self) -> list[str]:
        with contextlib.suppress(OSError):
            stamp = os.fstat(self._dir_fd).st_mtime_ns
            if stamp != self._peers_seen:
                self._peers = [n for n in os.listdir(self._dir_fd) if n != self._name]
                self._peers_seen = stamp
        return self._peers

    def _address(self, name: str) -> str:
        path = f"{self.folder}/{name}"
        return path if len(path) < _MAX_PATH else f"/proc/self/fd/{self._dir_fd}/{name}"
