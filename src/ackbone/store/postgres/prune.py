"""Pruning the ledger: old events go, and a signed checkpoint says that they were meant to.

A checkpoint is made of anchors: it names one, and where every chain stood there, as that one or one
before it signed it. So nothing goes that was not signed, and `ledger verify` goes on from there. It
is committed first; then the rows go (`pruned_rows.py`). A crash in between leaves rows that the
next step removes.

A chain is left out of a checkpoint when its worker is long gone and no row of it is left. The row
of such a worker goes, too: a checkpoint must say where a chain stood unless it is over, and only
these rows tell that it is.
"""

from __future__ import annotations

import logging

from ackbone.core.clock import to_us
from ackbone.core.errors import StoreCorrupt
from ackbone.core.store import Worker
from ackbone.store.keep import DAY_US
from ackbone.store.seals import Anchor, Chain, Checkpoint, Head, key_id
from ackbone.store.unit import Change

from . import seals
from .arrays import moment
from .database import Tx
from .pruned_rows import Gone, PrunedRows, pruned_rows
from .store import PostgresStore

log = logging.getLogger("ackbone.ledger")

_MARGIN_US = DAY_US
"""A worker that ended so long before the cut has no event behind it."""
_LOCK = "SELECT pg_advisory_xact_lock(7310579635104524)"
"""Two that write a checkpoint at once take turns: when the role changes hands, they may overlap."""
_OVER = f"state IN ('left', 'dead') AND ended_at < {moment('$1::bigint')}"
_PRESENT = f"SELECT worker_id FROM workers WHERE NOT coalesce({_OVER}, false)"
_FORGET = f"DELETE FROM workers WHERE {_OVER}"
_NOW = "SELECT clock_timestamp()"


class Pruner:
    """Removes events older than `keep_days`. Run it under the role `retention`."""

    def __init__(self, store: PostgresStore, *, key: bytes, keep_days: float) -> None:
        self._store = store
        self._key = key
        self._keep_us = int(keep_days * DAY_US)
        # A checkpoint is an event, too: not one for every minute's worth of old ones.
        self._stride_us = min(DAY_US, self._keep_us // 10)
        self._done = ""
        """The checkpoint whose rows this process saw go."""

    async def step(self, worker: Worker) -> Gone:
        """Returns what went. If another process prunes just now, nothing."""
        async with pruned_rows(self._store.database) as rows:
            return Gone() if rows is None else await self._prune(rows, worker)

    async def _prune(self, rows: PrunedRows, worker: Worker) -> Gone:
        before = await seals.last_checkpoint(self._store)
        if before is not None:
            self._check(before[1])
        anchor = await self._next(before[1] if before else None)
        gone = Gone()
        if before is not None and (anchor is not None or before[0] != self._done):
            # Whatever a checkpoint leaves out, all of it must be gone by then.
            gone += await self._remove(rows, *before)
        if anchor is None or not gone.all:
            return gone
        checkpoint = await self._checkpoint(before[1] if before else None, anchor)
        await self._store.write(
            lambda tx, change: self._write(tx, change, checkpoint, before[0] if before else ""),
            worker_id=worker.worker_id,
        )
        after = await seals.last_checkpoint(self._store)
        return gone if after is None else gone + await self._remove(rows, *after)

    async def _remove(self, rows: PrunedRows, row_id: str, checkpoint: Checkpoint) -> Gone:
        gone = await rows.remove(row_id, checkpoint.at)
        if gone.all:
            self._done = row_id
        return gone

    # -- the checkpoint ---------------------------------------------------------------------------

    async def _next(self, before: Checkpoint | None) -> Anchor | None:
        """The anchor before which events may go; None: too little is old enough."""
        ((now,),) = await self._store.read(_NOW)
        since_us = 0 if before is None else before.at
        anchor = await seals.anchor_before(self._store, since_us, to_us(now) - self._keep_us)
        if anchor is None or before is None:
            return anchor
        young = anchor.n <= before.anchor or anchor.at - before.at < self._stride_us
        return None if young else anchor

    async def _checkpoint(self, before: Checkpoint | None, anchor: Anchor) -> Checkpoint:
        start = before or await seals.first_anchor(self._store) or anchor
        signed = await seals.signed_between(self._store, start, anchor, self._check)
        heads: dict[Chain, Head] = {head[:2]: head for head in (before.chains if before else ())}
        heads.update(signed)
        found = await self._store.read(_PRESENT, str(anchor.at - _MARGIN_US))
        present = {worker_id for (worker_id,) in found}
        kept = [h for chain, h in sorted(heads.items()) if chain in signed or chain[1] in present]
        checkpoint = Checkpoint(
            anchor=anchor.n, at=anchor.at, chains=tuple(kept), key_id=key_id(self._key)
        )
        return checkpoint.sealed(self._key)

    async def _write(self, tx: Tx, change: Change, checkpoint: Checkpoint, follows: str) -> None:
        await tx.rows(_LOCK)
        before = await seals.last_checkpoint(self._store)
        if (before[0] if before else "") != follows:
            return  # another process pruned meanwhile, or this very call did, and was not answered
        change.entries.append(checkpoint.entry())
        tx.before_end(_FORGET, str(checkpoint.at - _MARGIN_US))
        log.info("events before anchor %d are pruned", checkpoint.anchor)

    def _check(self, seal: Anchor | Checkpoint) -> None:
        """What says that it was signed with this key must be. Of seals of a key that was lost
        nobody can tell; they go like everything else."""
        if seal.key_id == key_id(self._key) and not seal.is_sealed_by(self._key):
            number = seal.n if isinstance(seal, Anchor) else seal.anchor
            kind = type(seal).__name__.lower()
            raise StoreCorrupt(
                f"the ledger is not pruned: its {kind} {number} was changed after it was signed; "
                "see 'ackbone ledger verify'"
            )
