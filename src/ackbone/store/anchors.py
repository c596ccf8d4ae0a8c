"""Anchors: each minute the ends of all chains that moved are signed, in the ledger and in a file.

The file is outside the database on purpose: if somebody cuts the table back to an earlier anchor,
the file still names the later ones. An anchor is committed first and then written to the file. If a
crash comes between the two, the next step writes the missing line.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ackbone.core.errors import StoreUnavailable
from ackbone.core.store import Worker

from .base import BaseStore
from .ledger import ANCHOR_TASK, Anchor, Chain, Tip, heads_of, next_anchor, read_anchor, readable
from .unit import Change, Row, Tx

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
            return read_anchor(line).n if line else 0
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


Reader = Callable[..., Awaitable[list[Row]]]
"""`BaseStore.read` or `Tx.rows`."""


class Moved(NamedTuple):
    """The chains that moved since an anchor."""

    previous: Anchor | None
    tips: Mapping[Chain, Tip]


class ChainEnds(Protocol):
    """How a dialect finds the chains that moved."""

    async def look(self) -> bool:
        """Read what can be read before the transaction. False: nothing was written since the last
        anchor."""

    async def moved(self, tx: Tx) -> Moved | None:
        """The chains that moved since the last anchor; None if there is nothing to sign, or if
        another process signed meanwhile. No other process can sign until the transaction ends."""

    def signed(self, anchor: Anchor) -> None:
        """An anchor was committed."""


class Anchors:
    """One step signs the chains that moved. Run it under the role `anchor`."""

    def __init__(
        self, store: BaseStore[Any], ends: ChainEnds, *, key: bytes, anchor_file: Path
    ) -> None:
        self._store = store
        self._ends = ends
        self._key = key
        self._file = AnchorFile(anchor_file)

    async def step(self, worker: Worker) -> Anchor | None:
        """Returns the new anchor; None if nothing was written since the last one."""
        filed = await self._complete_file()
        if not await self._ends.look():
            return None
        anchor = await self._store.write(
            lambda tx, change: self._write(tx, change, filed), worker_id=worker.worker_id
        )
        if anchor is not None:
            self._ends.signed(anchor)
            await self._complete_file()
        return anchor

    async def _write(self, tx: Tx, change: Change, filed: int) -> Anchor | None:
        found = await self._ends.moved(tx)
        if found is None:
            return None
        anchor = next_anchor(
            self._key,
            found.previous,
            filed=filed,
            at_us=await tx.moment(),
            chains=heads_of(found.tips),
        )
        change.entries.append(anchor.entry())
        return anchor

    async def _complete_file(self) -> int:
        """Append committed anchors that the file lacks; returns the last number in the file."""
        filed = await asyncio.to_thread(self._file.last)
        missing = await anchors_since(self._store.read, self._store.sql.maintenance.seals, filed)
        if missing:
            await asyncio.to_thread(self._file.append, missing)
            return missing[-1].n
        return filed


async def last_anchor(read: Reader, seals: str) -> Anchor | None:
    """The newest anchor."""
    found = await read(seals, ANCHOR_TASK, 1)
    return readable(read_anchor, found[0][0], ANCHOR_TASK) if found else None


async def anchors_since(read: Reader, seals: str, n: int) -> list[Anchor]:
    """Anchors after number `n`, oldest first."""
    limit = 100
    while True:
        rows = await read(seals, ANCHOR_TASK, limit)
        found = [readable(read_anchor, data, ANCHOR_TASK) for (data,) in rows]
        if len(rows) < limit or found[-1].n <= n:
            return [anchor for anchor in reversed(found) if anchor.n > n]
        limit *= 10
