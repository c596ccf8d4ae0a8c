"""Anchors: each minute the ends of all chains that moved are signed, in the table and in a file.

An anchor is committed first and written to the file then; what a crash between the two leaves out
of the file is made up for by the next step. A chain that the anchor before had already signed at
the same place is not listed again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from ackbone.core.store import Worker
from ackbone.store.anchor_file import AnchorFile
from ackbone.store.seals import TENANT, Anchor, Chain, heads_of, next_anchor
from ackbone.store.unit import Change

from . import seals
from .database import Tx
from .store import PostgresStore

_LOCK = "SELECT pg_advisory_xact_lock(7310579635104523)"
"""Two that anchor at once take turns: when the role changes hands, they may overlap."""


class Anchors:
    """One step: sign what moved since the last anchor. Run it under the role `anchor`."""

    def __init__(self, store: PostgresStore, *, key: bytes, anchor_file: Path) -> None:
        self._store = store
        self._key = key
        self._file = AnchorFile(anchor_file)
        self._signed: dict[Chain, int] = {}
        """Where this process signed chains last."""

    async def step(self, worker: Worker) -> Anchor | None:
        """Returns the new anchor; None if nothing was written since the last one."""
        filed = await self._bring_file_up()
        anchor = await self._store.write(
            lambda tx, change: self._write(tx, change, filed), worker_id=worker.worker_id
        )
        if anchor is not None:
            self._signed.update({head[:2]: head[2] for head in anchor.chains})
            await self._bring_file_up()
        return anchor

    async def _write(self, tx: Tx, change: Change, filed: int) -> Anchor | None:
        await tx.rows(_LOCK)
        previous = await seals.last_anchor(self._store)
        moved = await seals.tips_since(self._store, 0 if previous is None else previous.at)
        new = {
            chain: tip
            for chain, tip in moved.items()
            if tip.seq > max(self._signed.get(chain, 0), _listed(previous, chain))
        }
        if all(tenant == TENANT for tenant, _ in new):
            return None  # the last anchor's own row is no reason for another one
        now = await tx.moment()
        anchor = next_anchor(self._key, previous, filed=filed, at_us=now, chains=heads_of(new))
        change.entries.append(anchor.entry())
        return anchor

    async def _bring_file_up(self) -> int:
        """Anchors that are committed and not in the file are appended; returns its last number."""
        filed = await asyncio.to_thread(self._file.last)
        missing = await seals.anchors_since(self._store, filed)
        if missing:
            await asyncio.to_thread(self._file.append, missing)
            return missing[-1].n
        return filed


def _listed(anchor: Anchor | None, chain: Chain) -> int:
    if anchor is None:
        return 0
    return next((seq for *of, seq, _ in anchor.chains if tuple(of) == chain), 0)
