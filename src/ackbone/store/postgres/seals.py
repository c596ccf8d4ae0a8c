"""Anchors, checkpoints and chain ends in the tables of PostgreSQL, found by time.

Commits of different workers do not become visible in the order of their times: a transaction may
appear up to `LATE_S` after younger ones. So every search begins that much earlier.
"""

from __future__ import annotations

from collections.abc import Callable

from ackbone.pgserver.arrays import moment
from ackbone.pgserver.connections import CALL_S
from ackbone.store.anchors import Moved, last_anchor
from ackbone.store.ledger import (
    ANCHOR_TASK,
    PRUNED_TASK,
    TENANT,
    Anchor,
    Chain,
    Checkpoint,
    Head,
    Tip,
    read_anchor,
    read_checkpoint,
    readable,
)
from ackbone.store.retention import DAY_US
from ackbone.store.unit import Tx

from .store import PostgresStore

LATE_S = 2 * CALL_S
LATE_US = int(LATE_S * 1e6)
_FOR_EVER_US = 100_000 * DAY_US
_ANCHORS_BETWEEN = (
    "SELECT data::text FROM event_log WHERE tenant_id = $1 AND task_id = $2"
    f" AND created_at >= {moment('$3::bigint')} AND created_at < {moment('$4::bigint')}"
    " ORDER BY created_at {order}, seq {order} LIMIT {limit}"
)
_CHECKPOINT = (
    "SELECT id::text, data::text FROM event_log WHERE tenant_id = $1 AND task_id = $2"
    " ORDER BY created_at DESC, seq DESC LIMIT 1"
)
_TIPS = (
    "SELECT DISTINCT ON (tenant_id, worker_id) tenant_id, worker_id, seq, hash FROM event_log"
    f" WHERE created_at >= {moment('$1::bigint')} ORDER BY tenant_id, worker_id, seq DESC"
)


async def tips_since(store: PostgresStore, at_us: int) -> dict[Chain, Tip]:
    """The ends of the chains that moved since `at_us`."""
    rows = await store.read(_TIPS, str(max(0, at_us - LATE_US)))
    return {(t, w): Tip(seq, digest, 0) for t, w, seq, digest in rows}


# ── for the pruner ───────────────────────────────────────────────────────────────────────────────


async def last_checkpoint(store: PostgresStore) -> tuple[str, Checkpoint] | None:
    """The newest checkpoint and the id of its row."""
    found = await store.read(_CHECKPOINT, TENANT, PRUNED_TASK)
    if not found:
        return None
    ((row_id, data),) = found
    return str(row_id), readable(read_checkpoint, data, PRUNED_TASK)


async def first_anchor(store: PostgresStore) -> Anchor | None:
    """The oldest anchor."""
    return await _one(store, 0, _FOR_EVER_US, order="ASC")


async def anchor_before(store: PostgresStore, since_us: int, upto_us: int) -> Anchor | None:
    """The newest anchor of a span of time."""
    return await _one(store, since_us, upto_us + 1, order="DESC")


async def signed_between(
    store: PostgresStore, before: Anchor | Checkpoint, last: Anchor, check: Callable[[Anchor], None]
) -> dict[Chain, Head]:
    """Where the chains that anchors after `before` signed ended at the anchor `last`."""
    after = before.n - 1 if isinstance(before, Anchor) else before.anchor
    heads: dict[Chain, Head] = {}
    for since_us in range(before.at, last.at + LATE_US, DAY_US):
        for anchor in await _between(store, since_us, since_us + DAY_US, order="ASC", limit="ALL"):
            if not after < anchor.n <= last.n:
                continue
            check(anchor)
            for head in anchor.chains:
                if head[:2] not in heads or head[2] > heads[head[:2]][2]:
                    heads[head[:2]] = head
    return heads


async def _one(store: PostgresStore, since_us: int, end_us: int, *, order: str) -> Anchor | None:
    found = await _between(store, since_us, end_us, order=order, limit="1")
    return found[0] if found else None


async def _between(
    store: PostgresStore, since_us: int, end_us: int, *, order: str, limit: str
) -> list[Anchor]:
    statement = _ANCHORS_BETWEEN.format(order=order, limit=limit)
    rows = await store.read(statement, TENANT, ANCHOR_TASK, str(since_us), str(end_us))
    return [readable(read_anchor, data, ANCHOR_TASK) for (data,) in rows]


_LOCK = "SELECT pg_advisory_xact_lock(7310579635104526)"
"""Two processes that anchor at once take turns: when the role changes hands, they may overlap."""


class PostgresChainEnds:
    """`ChainEnds` of a PostgreSQL database. A look by time finds some ends again: those that were
    signed at the same place before are left out."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._signed: dict[Chain, int] = {}
        """Where this process signed chains last."""

    async def look(self) -> bool:
        return True

    async def moved(self, tx: Tx) -> Moved | None:
        await tx.rows(_LOCK)
        # Readers beside the transaction: the look may take long.
        previous = await last_anchor(self._store.read, self._store.sql.maintenance.seals)
        found = await tips_since(self._store, 0 if previous is None else previous.at)
        listed = {} if previous is None else {(t, w): seq for t, w, seq, _ in previous.chains}
        new = {
            chain: tip
            for chain, tip in found.items()
            if tip.seq > max(self._signed.get(chain, 0), listed.get(chain, 0))
        }
        if all(tenant == TENANT for tenant, _ in new):
            return None  # the last anchor's own row is no reason for another one
        return Moved(previous, new)

    def signed(self, anchor: Anchor) -> None:
        self._signed.update({head[:2]: head[2] for head in anchor.chains})
