"""Pruning the ledger: old events go, and a signed checkpoint says that they were meant to.

Only what stands before an anchor is pruned. The checkpoint is committed first: it names the anchor
and where every chain stood there, so that `ledger verify` starts from it. Then the rows go, a few
at a time, oldest first; a crash in between leaves rows that the next step removes.

Rows of former workers stay as long as their events: a checkpoint must say where a chain stood
unless it is over, and only these rows tell that it is. `verify` does without them. A worker that
wrote no event has no chain, and takes its row along when it leaves.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable

import msgspec

from ackbone.core.store import Worker
from ackbone.store.keep import DAY_US
from ackbone.store.seals import Chain, Checkpoint, Head, Tip, heads_of, key_id

from . import seals
from .store import SqliteStore

log = logging.getLogger("ackbone.ledger")

BATCH = 500
_MARGIN_US = DAY_US
"""A worker that ended so long before the cut has no event behind it, whatever its clock did."""


class Pruner:
    """Removes events older than `keep_days`, and the rows of workers that left no event."""

    def __init__(self, store: SqliteStore, *, key: bytes, keep_days: float) -> None:
        self._store = store
        self._key = key
        self._keep_us = int(keep_days * DAY_US)
        # A checkpoint is an event, too: not one for every minute's worth of old ones.
        self._stride_us = min(DAY_US, self._keep_us // 10)

    async def step(self, worker: Worker) -> int:
        """Returns how many events were deleted."""
        file = self._store.file
        found = await file.read(self._cut)
        if found is not None:
            await file.write(lambda conn: self._write(conn, worker, *found))
        return await self._delete()

    # -- the checkpoint ---------------------------------------------------------------------------

    def _cut(self, conn: sqlite3.Connection) -> tuple[Checkpoint, str] | None:
        """The next checkpoint and the MAC of the one it follows; None: too little is old enough."""
        now = self._store.expiry_us(self._store.clock.now_us())  # in doubt nothing is old
        anchored = seals.anchor_before(conn, now - self._keep_us)
        if anchored is None:
            return None
        rowid, anchor = anchored
        before = seals.last_checkpoint(conn)
        start = 0
        if before is None:
            oldest = conn.execute("SELECT min(rowid), created_at FROM event_log").fetchone()[1]
        else:
            start = seals.anchor_row(conn, before[1].anchor) or 0
            oldest = before[1].at
            if before[1].anchor >= anchor.n:
                return None
        if oldest is None or anchor.at - oldest < self._stride_us:
            return None
        heads: dict[Chain, Head] = {h[:2]: h for h in (before[1].chains if before else ())}
        for tips, _ in seals.tips(conn, max(0, start - 1), upto=rowid - 1):
            heads.update((head[:2], head) for head in heads_of(tips))
        over = _ended_before(conn, anchor.at - _MARGIN_US)
        listed = {head[:2] for head in anchor.chains}
        kept = [h for chain, h in sorted(heads.items()) if chain in listed or chain[1] not in over]
        checkpoint = Checkpoint(
            anchor=anchor.n, at=anchor.at, chains=tuple(kept), key_id=key_id(self._key)
        )
        return checkpoint.sealed(self._key), "" if before is None else before[1].mac

    def _write(
        self, conn: sqlite3.Connection, worker: Worker, checkpoint: Checkpoint, follows: str
    ) -> None:
        before = seals.last_checkpoint(conn)
        if ("" if before is None else before[1].mac) != follows:
            return  # another process pruned meanwhile
        now = self._store.clock.now_us()
        self._store.ledger.append(conn, worker.worker_id, [checkpoint.entry()], now)
        gone = conn.execute(
            "DELETE FROM workers WHERE state IN ('left', 'dead') AND ended_at < ?",
            (checkpoint.at - _MARGIN_US,),
        ).rowcount
        log.info(
            "events before anchor %d are pruned; %d rows of former workers went with them",
            checkpoint.anchor,
            gone,
        )

    # -- the rows ---------------------------------------------------------------------------------

    async def _delete(self) -> int:
        file = self._store.file
        found = await file.read(_leftover)
        if found is None:
            return 0
        before, spared = found
        marks = msgspec.json.encode(sorted(spared)).decode()
        deleted = 0
        while True:
            # Not synced: a deletion that a power cut takes back is made again.
            n = await file.write(
                lambda conn: (
                    conn.execute(
                        "DELETE FROM event_log WHERE rowid IN (SELECT rowid FROM event_log"
                        " WHERE rowid < ? AND rowid NOT IN (SELECT value FROM json_each(?))"
                        " ORDER BY rowid LIMIT ?)",
                        (before, marks, BATCH),
                    ).rowcount
                ),
                durable=False,
            )
            deleted += n
            if n < BATCH:
                return deleted


def _leftover(conn: sqlite3.Connection) -> tuple[int, set[int]] | None:
    """The first row to keep, and rows before it that stay: ends of chains that may go on."""
    found = seals.last_checkpoint(conn)
    if found is None:
        return None
    before = seals.anchor_row(conn, found[1].anchor)
    (first,) = conn.execute("SELECT min(rowid) FROM event_log").fetchone()
    if before is None or first is None or first >= before:
        return None
    ends: dict[Chain, Tip] = {}
    for tips, _ in seals.tips(conn, first - 1, upto=before - 1):
        ends.update(tips)
    return before, _ends_of_the_living(conn, ends.items())


def _ends_of_the_living(conn: sqlite3.Connection, ends: Iterable[tuple[Chain, Tip]]) -> set[int]:
    """A writer that lost its memory of a chain (a rollback) reads its end from the table."""
    alive = {w for (w,) in conn.execute("SELECT worker_id FROM workers WHERE state = 'alive'")}
    return {tip.rowid for (_, worker_id), tip in ends if worker_id in alive}


def _ended_before(conn: sqlite3.Connection, moment_us: int) -> set[int]:
    found = conn.execute(
        "SELECT worker_id FROM workers WHERE state IN ('left', 'dead') AND ended_at < ?",
        (moment_us,),
    )
    return {worker_id for (worker_id,) in found}
