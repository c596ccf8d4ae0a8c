"""Retention on PostgreSQL: old rows, and old events of the ledger.

Old tasks are found through an index, queue by queue. The other tables are small and are read from
end to end. Rows that somebody else has locked are passed over, so locks need no order.

Old events are deleted, and a signed checkpoint says so. It is made from anchors: it names one, and
where every chain ended there, as that anchor or an earlier one signed it. So only signed events are
deleted, and `ledger verify` can start from the checkpoint. It is committed first; then the rows are
deleted (`pruned_rows.py`). A crash in between leaves rows that the next step deletes.

A chain is left out of a checkpoint when its worker ended long ago and no row of it is left. The row
of that worker is deleted, too: a checkpoint must list every chain that may continue, and only these
rows say that a worker has ended.
"""

from __future__ import annotations

import logging

from ackbone.core.clock import to_us
from ackbone.core.errors import StoreCorrupt
from ackbone.core.store import Worker
from ackbone.pgserver.arrays import MICROSECOND, moment
from ackbone.store.ledger import Anchor, Chain, Checkpoint, Head, key_id
from ackbone.store.retention import BATCH, MARGIN_US, TASKS, Pruning, Rule, delete_all

from . import seals
from .database import Tx
from .pruned_rows import Gone, PrunedRows, pruned_rows
from .sql import SQL
from .store import PostgresStore

_BEFORE = moment("$1::bigint")
_DELETE = (
    "DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} t WHERE {over}"
    f" LIMIT {BATCH} FOR UPDATE SKIP LOCKED) RETURNING 1"
)


def _over(rule: Rule) -> str:
    return rule.over.format(before=_BEFORE, us=MICROSECOND)


DELETE_TASKS = (
    "WITH gone AS (DELETE FROM queue_executions WHERE (tenant_id, subscription, message_id) IN"
    " (SELECT t.tenant_id, t.subscription, t.message_id FROM queue_executions t"
    f" WHERE t.tenant_id = $2 AND t.queue_name = $3 AND t.started_at < {_BEFORE}"
    f" AND {_over(TASKS)} ORDER BY t.started_at LIMIT {BATCH} FOR UPDATE SKIP LOCKED)"
    " RETURNING tenant_id, subscription, message_id),"
    " effects_gone AS (DELETE FROM effects e USING gone g WHERE e.tenant_id = g.tenant_id"
    " AND e.subscription = g.subscription AND e.message_id = g.message_id)"
    " SELECT tenant_id FROM gone"
)
"""In the order of the index: in any other, all rows that may go would be sorted for each batch, in
the end for longer than a statement may take."""


class PostgresOldRows:
    """`OldRows` of a PostgreSQL database."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def delete(self, rule: Rule, keep_us: int) -> int:
        if rule is TASKS:
            return await self._tasks(keep_us)
        statement = _DELETE.format(table=rule.table, key=rule.key, over=_over(rule))
        return await delete_all(self._store, statement, keep_us)

    async def _tasks(self, keep_us: int) -> int:
        gone = 0
        for tenant, queue in await self._store.read(SQL.records.queues):
            gone += await delete_all(self._store, DELETE_TASKS, keep_us, tenant, queue)
        return gone


log = logging.getLogger("ackbone.ledger")

_LOCK = "SELECT pg_advisory_xact_lock(7310579635104524)"
"""Two processes that write a checkpoint take turns: the role may change hands meanwhile."""
_OVER = f"state IN ('left', 'dead') AND ended_at < {moment('$1::bigint')}"
_PRESENT = f"SELECT worker_id FROM workers WHERE NOT coalesce({_OVER}, false)"
_NOW = "SELECT clock_timestamp()"


class Pruner(Pruning):
    """Deletes events older than `keep_days`. Run it under the role `retention`."""

    _store: PostgresStore

    def __init__(self, store: PostgresStore, *, key: bytes, keep_days: float) -> None:
        super().__init__(store, key=key, keep_days=keep_days)
        self._done = ""
        """The last checkpoint whose rows this process deleted completely."""

    async def step(self, worker: Worker) -> Gone:
        """Returns what was deleted: nothing if another process prunes at this moment, or while the
        clock is in doubt."""
        if self._store.expiry_paused:
            return Gone()
        async with pruned_rows(self._store.database) as rows:
            return Gone() if rows is None else await self._prune(rows, worker)

    async def _prune(self, rows: PrunedRows, worker: Worker) -> Gone:
        before = await seals.last_checkpoint(self._store)
        if before is not None:
            self._check(before[1])
        anchor = await self._next(before[1] if before else None)
        gone = Gone()
        if before is not None and (anchor is not None or before[0] != self._done):
            # The next checkpoint may leave chains out, so all their rows must be deleted before.
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
        """The anchor before which events may be deleted; None if too little is old enough."""
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
        found = await self._store.read(_PRESENT, str(anchor.at - MARGIN_US))
        present = {worker_id for (worker_id,) in found}
        kept = [h for chain, h in sorted(heads.items()) if chain in signed or chain[1] in present]
        return self._checkpoint_at(anchor, kept)

    async def _newest(self, tx: Tx) -> str:
        await tx.rows(_LOCK)
        found = await seals.last_checkpoint(self._store)
        return found[0] if found else ""

    def _check(self, seal: Anchor | Checkpoint) -> None:
        """Raises StoreCorrupt for a seal that names this key and is not signed with it. Seals of a
        lost key cannot be checked; they are pruned like everything else."""
        if seal.key_id == key_id(self._key) and not seal.is_sealed_by(self._key):
            number = seal.n if isinstance(seal, Anchor) else seal.anchor
            kind = type(seal).__name__.lower()
            raise StoreCorrupt(
                f"the ledger is not pruned: its {kind} {number} was changed after it was signed; "
                "see 'ackbone ledger verify'"
            )
