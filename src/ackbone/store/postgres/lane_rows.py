"""Conversations on PostgreSQL: their sources, and which of their tasks is next.

The one fetcher of a source holds its row while it writes a batch, so that numbers are given out and
seen in one order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ackbone.store.conditions import ENDED, none_of
from ackbone.store.tables import Pair
from ackbone.store.unit import Lane

from . import arrays
from .arrays import BEGUN
from .sql import SQL

if TYPE_CHECKING:
    from .database import Tx

_ALIVE = "SELECT state FROM workers WHERE worker_id = $1::bigint FOR SHARE"
OWNER = (
    "SELECT s.worker_id FROM sources s JOIN workers w ON w.worker_id = s.worker_id"
    " WHERE s.subscription = $1 AND s.part = '' AND w.state = 'alive'"
)
_BUSY = (
    "SELECT u.tenant, u.lane FROM unnest($2::text[], $3::text[]) u(tenant, lane)"
    " WHERE EXISTS (SELECT 1 FROM queue_executions q WHERE q.tenant_id = u.tenant"
    " AND q.subscription = $1 AND q.lane = u.lane AND q.lane IS NOT NULL"
    f" AND {none_of(*ENDED, column='q.status')})"
)
_ADVANCE = (
    f"UPDATE queue_executions q SET status = 'ready', due_at = {BEGUN}"
    " FROM unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, lane)"
    " CROSS JOIN LATERAL (SELECT f.message_id, f.status FROM queue_executions f"
    " WHERE f.tenant_id = u.tenant AND f.subscription = u.sub AND f.lane = u.lane"
    f" AND f.lane IS NOT NULL AND {none_of(*ENDED, column='f.status')}"
    " ORDER BY f.lane_seq LIMIT 1) h"
    " WHERE h.status = 'queued' AND q.tenant_id = u.tenant AND q.subscription = u.sub"
    " AND q.message_id = h.message_id AND q.status = 'queued' RETURNING 1"
)


class PostgresLaneRows:
    """`LaneRows` in one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    async def own_source(self, subscription: str, worker_id: int) -> bool:
        # The worker's own row is held until the end: a reaper must not give the source to another
        # worker while a batch of the old fetcher is under way.
        if await self._tx.rows(_ALIVE, worker_id) != [("alive",)]:
            return False
        return bool(await self._tx.rows(SQL.claims.own_source, subscription, worker_id))

    async def busy(self, subscription: str, lanes: Collection[Pair]) -> set[Pair]:
        wanted = sorted(lanes)
        columns = [arrays.texts([lane[n] for lane in wanted]) for n in range(2)]
        found = await self._tx.rows(_BUSY, subscription, *columns)
        return {(tenant_id, lane) for tenant_id, lane in found}

    async def advance(self, lanes: Collection[Lane]) -> int:
        found = sorted(lanes)
        columns = [arrays.texts([lane[n] for lane in found]) for n in range(3)]
        return len(await self._tx.rows(_ADVANCE, *columns))
