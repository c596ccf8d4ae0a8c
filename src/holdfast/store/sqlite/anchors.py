"""Anchors: each minute the ends of all chains that moved are signed, in the table and in a file.

The file is outside the database on purpose: a table that was cut back to an earlier anchor lacks
what the file names. An anchor is committed first and written to the file then; what a crash between
the two leaves out of the file is made up for by the next step.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.core.errors import StoreUnavailable
from holdfast.core.store import Worker

from . import seals
from .seals import Anchor, Chain, Tip
from .store import SqliteStore

log = logging.getLogger("holdfast.ledger")

_TAIL = 64 * 1024


class Anchors:
    """One step: sign what moved since the last anchor. Run it under the role `anchor`."""

    def __init__(self, store: SqliteStore, *, key: bytes, anchor_file: Path) -> None:
        self._store = store
        self._key = key
        self._file = AnchorFile(anchor_file)

    async def step(self, worker: Worker) -> Anchor | None:
        """Returns the new anchor; None if nothing was written since the last one."""
        filed = await asyncio.to_thread(self._bring_file_up)
        found = await self._store.file.read(_moved)
        if found is None:
            return None
        anchor = await self._store.file.write(lambda conn: self._write(conn, worker, filed, *found))
        if anchor is not None:
            await asyncio.to_thread(self._bring_file_up)
        return anchor

    def _write(
        self,
        conn: sqlite3.Connection,
        worker: Worker,
        filed: int,
        moved: dict[Chain, Tip],
        seen: int,
        previous: Anchor | None,
    ) -> Anchor | None:
        """Inside the transaction: what was written since the look is few rows, and is added."""
        newest = seals.last_anchor(conn)
        if (None if newest is None else newest[1]) != previous:
            return None  # another process anchored meanwhile
        for tips, _ in seals.tips(conn, seen):
            moved = {**moved, **tips}
        now = self._store.clock.now_us()
        number = 0 if previous is None else previous.n
        if filed > number:
            log.error(
                "the anchor file knows %d anchors, the ledger only %d: the ledger was cut or"
                " restored from a copy; see 'holdfast ledger verify'",
                filed,
                number,
            )
        anchor = Anchor(
            n=max(number, filed) + 1,
            at=now,
            chains=seals.heads_of(moved),
            previous="" if previous is None else previous.mac,
            key_id=seals.key_id(self._key),
        ).sealed(self._key)
        self._store.ledger.append(conn, worker.worker_id, [anchor.entry()], now)
        return anchor

    def _bring_file_up(self) -> int:
        """Anchors that are committed and not in the file are appended; returns its last number."""
        filed = self._file.last()
        missing = self._store.file.read_sync(lambda conn: seals.anchors_since(conn, filed))
        if missing:
            self._file.append(missing)
            return missing[-1].n
        return filed


def _moved(conn: sqlite3.Connection) -> tuple[dict[Chain, Tip], int, Anchor | None] | None:
    """Chains that moved since the last anchor, the last row seen, that anchor; None: none did."""
    newest = seals.last_anchor(conn)
    at, previous = newest if newest is not None else (0, None)
    # The last anchor's own row moved its chain; alone it is no reason for another anchor.
    moved: dict[Chain, Tip] = {}
    seen = at
    for tips, last in seals.tips(conn, max(0, at - 1)):
        moved.update(tips)
        seen = last
    return None if seen <= at else (moved, seen, previous)


class AnchorFile:
    """One JSON line per anchor, synced. A line that a crash tore is taken off again."""

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
            log.error("the last line of %s is no anchor", self.path)
            return 0

    def append(self, anchors: Sequence[Anchor]) -> None:
        """Those that are not there yet; two processes may try at once."""
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

    def read(self) -> Iterator[bytes]:
        """Its lines, whole ones and a torn last one alike."""
        with self.path.open("rb") as file:
            yield from file


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
