"""Retention on SQLite: old rows, the files of former workers, and old events of the ledger.

A reader finds the rows that may go, page by page from the oldest on. The writer deletes them by
their rowids and asks again whether the rule still holds: it never searches a table.

Only events of the ledger before an anchor are deleted, and a signed checkpoint says so. It is
committed first: it names the anchor and where every chain ended there, so that `ledger verify` can
start from it. Then the rows are deleted by rowid, a few at a time, oldest first. A crash in between
leaves rows that the next step deletes.

Rows of former workers are kept as long as their events: a checkpoint must list every chain that may
continue, and only these rows say that a worker has ended. `verify` does not need them. A worker
that wrote no event has no chain, and its row is deleted when it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterable

import msgspec

from ackbone.core.store import Worker
from ackbone.store.ledger import Chain, Checkpoint, Head, Tip, heads_of
from ackbone.store.retention import BATCH, MARGIN_US, TASKS, Pruning, Rule, delete_some

from . import seals
from .store import SqliteStore, SqliteTx

PAGE = 5000
"""Rows that one reading looks at."""
_LOOK = (
    "SELECT t.rowid, {over}, t.{made} >= ?1 FROM {table} t WHERE t.rowid > ?2 ORDER BY t.rowid"
    " LIMIT ?3"
)
_THESE = "t.rowid IN (SELECT value FROM json_each(?2)) AND {over}"
_DELETE = f"DELETE FROM {{table}} AS t WHERE {_THESE} RETURNING 1"
_DELETE_EFFECTS = (
    "DELETE FROM effects WHERE (tenant_id, subscription, message_id) IN (SELECT t.tenant_id,"
    f" t.subscription, t.message_id FROM queue_executions t WHERE {_THESE})"
)
_ALIVE = "SELECT worker_id FROM workers WHERE state = 'alive'"


class SqliteOldRows:
    """`OldRows` of a SQLite file."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def delete(self, rule: Rule, keep_us: int) -> int:
        gone = after = 0
        deletions = [_sql(_DELETE, rule)]
        if rule is TASKS:
            deletions.insert(0, _sql(_DELETE_EFFECTS, rule))
        while True:
            page = await self._page(rule, keep_us, after)
            over = [rowid for rowid, may_go, _ in page if may_go]
            for at in range(0, len(over), BATCH):
                some = over[at : at + BATCH]
                gone += await delete_some(self._store, deletions, keep_us, some)
            if len(page) < PAGE or all(young for _, _, young in page):
                return gone
            after = page[-1][0]

    async def _page(self, rule: Rule, keep_us: int, after: int) -> list[tuple[int, int, int]]:
        """Rows behind `after`: the rowid, whether it may go, whether it is too young."""
        before_us = self._store.clock.now_us() - keep_us
        found = await self._store.read(_sql(_LOOK, rule), before_us, after, PAGE)
        return [(rowid, may_go, young) for rowid, may_go, young in found]


def _sql(statement: str, rule: Rule) -> str:
    over = rule.over.format(before="?1", us="1")
    return statement.format(table=rule.table, over=over, made=rule.made)


class WorkerFiles:
    """One step removes the files of workers whose process is gone."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def step(self, worker: Worker) -> int:
        """Returns how many files were removed."""
        alive = {worker_id for (worker_id,) in await self._store.read(_ALIVE)}
        return await asyncio.to_thread(self._store.file.tidy, alive)


log = logging.getLogger("ackbone.ledger")


class Pruner(Pruning):
    """Deletes events older than `keep_days`, and rows of workers that have no event left."""

    _store: SqliteStore

    async def step(self, worker: Worker) -> int:
        """Returns how many events were deleted."""
        file = self._store.file
        found = await file.read(self._cut)
        if found is not None:
            await self._store.write(
                lambda tx, change: self._write(tx, change, *found), worker_id=worker.worker_id
            )
        return await self._delete()

    # -- the checkpoint ---------------------------------------------------------------------------

    def _cut(self, conn: sqlite3.Connection) -> tuple[Checkpoint, str] | None:
        """The next checkpoint and the MAC of the previous one; None if too little is old enough."""
        # Nothing is old while the clock is in doubt.
        now = self._store.expiry_us(self._store.clock.now_us())
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
        over = _ended_before(conn, anchor.at - MARGIN_US)
        listed = {head[:2] for head in anchor.chains}
        kept = [h for chain, h in sorted(heads.items()) if chain in listed or chain[1] not in over]
        return self._checkpoint_at(anchor, kept), "" if before is None else before[1].mac

    async def _newest(self, tx: SqliteTx) -> str:
        found = seals.last_checkpoint(tx.conn)
        return "" if found is None else found[1].mac

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
    """The first row to keep, and earlier rows that are kept: ends of chains that may continue."""
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
    """A writer that forgot the end of a chain (after a rollback) reads it from the table."""
    alive = {w for (w,) in conn.execute("SELECT worker_id FROM workers WHERE state = 'alive'")}
    return {tip.rowid for (_, worker_id), tip in ends if worker_id in alive}


def _ended_before(conn: sqlite3.Connection, moment_us: int) -> set[int]:
    found = conn.execute(
        "SELECT worker_id FROM workers WHERE state IN ('left', 'dead') AND ended_at < ?",
        (moment_us,),
    )
    return {worker_id for (worker_id,) in found}
