"""Old rows of a PostgreSQL store.

Old tasks are found through an index, queue by queue. The other tables are small and are read from
end to end. Rows that somebody else has locked are passed over, so locks need no order.
"""

from __future__ import annotations

from ackbone.store.retention import BATCH, TASKS, Rule, delete_all

from .arrays import MICROSECOND, moment
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
