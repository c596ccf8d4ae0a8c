"""Anchors: each minute the ends of all chains that moved are signed, in the table and in a file.

The file is outside the database on purpose: a table that was cut back to an earlier anchor lacks
what the file names. An anchor is committed first and written to the file then; what a crash between
the two leaves out of the file is made up for by the next step.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from ackbone.core.store import Worker
from ackbone.store.anchor_file import AnchorFile
from ackbone.store.seals import Anchor, Chain, Tip, heads_of, next_anchor

from . import seals
from .store import SqliteStore


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
        anchor = next_anchor(self._key, previous, filed=filed, at_us=now, chains=heads_of(moved))
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
