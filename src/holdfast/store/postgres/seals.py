"""Where the ledger's seals stand in the table, and where its chains end: by time.

Commits of different workers do not appear in the order of their times: a transaction may become
visible up to `LATE_S` after younger ones. So a look back begins that much earlier.
"""

from __future__ import annotations

from holdfast.store.seals import ANCHOR_TASK, TENANT, Anchor, Chain, Tip, read_anchor, readable

from .arrays import moment
from .database import CALL_S
from .store import PostgresStore

LATE_S = 2 * CALL_S
_ANCHORS = (
    "SELECT data::text FROM event_log WHERE tenant_id = $1 AND task_id = $2"
    " ORDER BY created_at DESC, seq DESC LIMIT {}"
)
_TIPS = (
    "SELECT DISTINCT ON (tenant_id, worker_id) tenant_id, worker_id, seq, hash FROM event_log"
    f" WHERE created_at >= {moment('$1::bigint')} ORDER BY tenant_id, worker_id, seq DESC"
)


async def last_anchor(store: PostgresStore) -> Anchor | None:
    """The newest anchor."""
    found = await store.read(_ANCHORS.format(1), TENANT, ANCHOR_TASK)
    return readable(read_anchor, found[0][0], ANCHOR_TASK) if found else None


async def anchors_since(store: PostgresStore, n: int) -> list[Anchor]:
    """Anchors after number `n`, oldest first."""
    limit, found = 100, []
    while True:
        rows = await store.read(_ANCHORS.format("$3::int"), TENANT, ANCHOR_TASK, str(limit))
        found = [readable(read_anchor, data, ANCHOR_TASK) for (data,) in rows]
        if len(rows) < limit or found[-1].n <= n:
            return [anchor for anchor in reversed(found) if anchor.n > n]
        limit *= 10


async def tips_since(store: PostgresStore, at_us: int) -> dict[Chain, Tip]:
    """The ends of the chains that moved since a moment."""
    rows = await store.read(_TIPS, str(max(0, at_us - int(LATE_S * 1e6))))
    return {(t, w): Tip(seq, digest, 0) for t, w, seq, digest in rows}
