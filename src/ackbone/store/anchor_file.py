"""The anchor file. It is outside the database on purpose: if somebody cuts the table back to an
earlier anchor, the file still names the later ones.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ackbone.core.errors import StoreUnavailable
from ackbone.store import seals
from ackbone.store.seals import Anchor

log = logging.getLogger("ackbone.ledger")

_TAIL = 64 * 1024


class AnchorFile:
    """One JSON line per anchor, synced. A line that a crash cut short is removed again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def last(self) -> int:
        """The number of the last whole line; 0 if there is none."""
        try:
            with self.path.open("rb") as file:
                return self._number(_last_line(file.fileno()))
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise StoreUnavailable(f"the anchor file {self.path}: {error.strerror}") from error

    def _number(self, line: bytes) -> int:
        try:
            return seals.read_anchor(line).n if line else 0
        except msgspec.MsgspecError:
            log.error("the last line of %s is not an anchor", self.path)
            return 0

    def append(self, anchors: Sequence[Anchor]) -> None:
        """Append the anchors that the file lacks. Two processes may do so at once."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                there = self._number(_last_line(fd))
                new = [msgspec.json.encode(anchor) for anchor in anchors if anchor.n > there]
                lines = b"".join(line + b"\n" for line in new)
                size = _whole(fd)
                os.ftruncate(fd, size)
                if os.pwrite(fd, lines, size) != len(lines):
                    raise OSError(errno.ENOSPC, "no room for the whole line")
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StoreUnavailable(f"the anchor file {self.path}: {error.strerror}") from error

    def size(self) -> int:
        """The size of the file, in bytes."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, upto: int | None = None) -> Iterator[bytes]:
        """The lines of the file, also a last one that was cut short; up to an earlier `size`."""
        at = 0
        with self.path.open("rb") as file:
            for line in file:
                at += len(line)
                if upto is not None and at > upto:
                    return
                yield line


def _whole(fd: int) -> int:
    """Bytes up to the end of the last whole line."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _TAIL)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _last_line(fd: int) -> bytes:
    """The last whole line, without its end."""
    end = _whole(fd)
    if end == 0:
        return b""
    line = b""
    at = end - 1
    while at > 0:
        start = max(0, at - _TAIL)
        line = os.pread(fd, at - start, start) + line
        cut = line.rfind(b"\n")
        if cut >= 0:
            return line[cut + 1 :]
        at = start
    return line
