"""Anchors: each minute the ends of all chains that moved are signed, in the ledger and in a file.

The file is outside the database on purpose: if somebody cuts the table back to an earlier anchor,
the file still names the later ones. An anchor is committed first and then written to the file. If a
crash comes between the two, the next step writes the missing line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from ackbone.core.store import Worker

from .anchor_file import AnchorFile
from .seals import (
    ANCHOR_TASK,
    Anchor,
    Chain,
    Tip,
    heads_of,
    next_anchor,
    read_anchor,
    readable,
)
from .unit import Change, Row, Tx, UnitOfWork

Reader = Callable[..., Awaitable[list[Row]]]
"""`UnitOfWork.read` or `Tx.rows`."""


class Moved(NamedTuple):
    """The chains that moved since an anchor."""

    previous: Anchor | None
    tips: Mapping[Chain, Tip]


class ChainEnds(Protocol):
    """How a dialect finds the chains that moved."""

    async def look(self) -> bool:
        """Read what can be read before the transaction. False: nothing was written since the last
        anchor."""
        ...

    async def moved(self, tx: Tx) -> Moved | None:
        """The chains that moved since the last anchor; None if there is nothing to sign, or if
        another process signed meanwhile. No other process can sign until the transaction ends."""
        ...

    def signed(self, anchor: Anchor) -> None:
        """An anchor was committed."""
        ...


class Anchors:
    """One step signs the chains that moved. Run it under the role `anchor`."""

    def __init__(
        self, store: UnitOfWork, ends: ChainEnds, *, key: bytes, anchor_file: Path
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
