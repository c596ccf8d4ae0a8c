"""SQLite's write-ahead log: how long it is, which process keeps it from starting over, and the
witness that nothing of it went missing.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from .sharing import Holder, who_reads_since

# -- the length of the log -----------------------------------------------------------------------

log = logging.getLogger("ackbone.sqlite")

CHECKPOINT_FRAMES = 2000
"""Pages in the log after which the process that has just written copies it into the database."""
LONG_BYTES = 256 * 1024 * 1024
"""Size in bytes from which a log is reported: something keeps SQLite from starting it over."""
_HEADER = 136
"""Bytes of the `-shm` file that contain the length of the log, the page size and the read marks."""


class WriteAheadLog:
    """The log of one database, as its writer thread sees it. Called under the turnstile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._long_frames: int | None = None
        self._reported = False

    def checkpoint_if_long(self, conn: sqlite3.Connection) -> None:
        """Copy the log into the database once it is long. Report one that cannot start over."""
        frames = self._frames()
        if frames >= CHECKPOINT_FRAMES:
            # Under the turnstile, like every write: SQLite up to 3.51.2 can lose commits when a
            # checkpoint and a write meet.
            conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._report_if_long(frames)
        elif self._reported:
            self._reported = False
            log.warning("%s-wal: SQLite has started the log over; it no longer grows", self._path)

    def _frames(self) -> int:
        """Return the number of valid frames, from the header of the shared index (mxFrame)."""
        if self._fd is None:
            try:
                self._fd = os.open(f"{self._path}-shm", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return 0
        return int.from_bytes(os.pread(self._fd, 4, 16), "little")

    def _report_if_long(self, frames: int) -> None:
        if self._reported or self._fd is None:
            return
        if self._long_frames is None:
            self._long_frames = LONG_BYTES // _page_size(os.pread(self._fd, _HEADER, 0))
        if frames >= self._long_frames:
            self._reported = True
            long = _long(self._path, os.pread(self._fd, _HEADER, 0))
            if long is not None:
                log.warning("%s; %s", *long)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def long_log(path: Path) -> tuple[str, str] | None:
    """Describe a log that has grown long, and say what to do. None while it is short."""
    try:
        if os.stat(f"{path}-wal").st_size < LONG_BYTES:
            return None
        # Kept open: closing any handle of this file would release the locks on it that SQLite
        # holds for other connections of this process.
        return _long(path, os.pread(os.open(f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC), _HEADER, 0))
    except OSError:
        return None


def _long(path: Path, shm: bytes) -> tuple[str, str] | None:
    if len(shm) < _HEADER:
        return None
    size = int.from_bytes(shm[16:20], "little") * _page_size(shm)
    if size < LONG_BYTES:
        return None
    megabytes = f"{size / 2**20:,.0f} MB"
    readers = who_reads_since(path, shm, behind=CHECKPOINT_FRAMES)
    if not readers:
        return (
            f"{path}-wal has grown to {megabytes}, because a read transaction keeps SQLite from "
            "starting it over",
            f"find the process that reads with 'fuser -v {path}', and end its transaction",
        )
    return (
        f"{path}-wal has grown to {megabytes}, and grows until the read transaction of "
        f"{_named(readers)} ends",
        f"end that transaction, or the process: 'kill {' '.join(str(r.pid) for r in readers)}'",
    )


def _named(readers: Sequence[Holder]) -> str:
    return " and ".join(str(reader) for reader in readers)


def _page_size(shm: bytes) -> int:
    """Return the page size of the header. 1 means 65536, which does not fit."""
    size = int.from_bytes(shm[14:16], "little")
    return 65536 if size == 1 else max(size, 512)


# -- the witness ---------------------------------------------------------------------------------

_FORM = struct.Struct("<8sQ32sI")
_MAGIC = b"HFWITN1\0"


class Witness:
    """The file `<db>.witness` with the number of durable commits.

    SQLite silently drops a damaged end of the log. The number is in the database, too, and a
    database that is behind its witness has lost commits. The witness is not synced: after a power
    cut it may be behind the database, but never ahead.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(f"{path}.witness")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> int | None:
        """Return the number. None for a new or unreadable file, which proves nothing."""
        return _commits_of(os.pread(self._fd, _FORM.size, 0))

    def write(self, commits: int, head: bytes = b"") -> None:
        """Write the number in place, without a sync. It must never be ahead of the database."""
        body = _FORM.pack(_MAGIC, commits, head[:32].ljust(32, b"\0"), 0)[:-4]
        os.pwrite(self._fd, body + zlib.crc32(body).to_bytes(4, "little"), 0)

    def close(self) -> None:
        os.close(self._fd)


def witnessed(path: Path) -> int | None:
    """Return the number of the witness of a database, without creating the file."""
    try:
        return _commits_of(Path(f"{path}.witness").read_bytes()[: _FORM.size])
    except FileNotFoundError:
        return None


def _commits_of(data: bytes) -> int | None:
    if len(data) < _FORM.size:
        return None
    magic, commits, _head, crc = _FORM.unpack(data)
    if magic != _MAGIC or crc != zlib.crc32(data[:-4]):
        return None
    return int(commits)
