"""Retention: what is over and old enough goes, a few rows at a time, so that nobody waits long.

The rules are those of the SQLite store. Old tasks are found through an index, queue by queue; the
other tables are small, and read. Each deletion asks again whether the row may go.
"""

from __future__ import annotations

import logging

import msgspec

from ackbone.core.store import Worker
from ackbone.store.keep import Keep
from ackbone.store.stored import FINAL_WORDS
from ackbone.store.unit import Change

from .database import Tx
from .store import PostgresStore
from .tasks import BEGUN
from .views import QUEUES

log = logging.getLogger("ackbone.store")

BATCH = 500
_BEFORE = f"({BEGUN} - $1::float8 * interval '1 day')"


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One table: which rows may go, and by which key they are named."""

    table: str
    key: str
    over: str


_TASKS = _Rule(
    table="queue_executions",
    key="tenant_id, subscription, message_id",
    over=(
        f"t.status IN {FINAL_WORDS} AND t.completed_at < {_BEFORE} AND NOT EXISTS (SELECT 1"
        " FROM dead_letters d WHERE d.tenant_id = t.tenant_id AND d.message_id = t.message_id"
        " AND d.subscription = t.subscription AND d.state = 'open')"
    ),
)
_APPROVALS = _Rule(
    table="approvals",
    key="id",
    over=(
        f"t.state <> 'pending' AND t.answered_at < {_BEFORE} AND NOT EXISTS (SELECT 1"
        " FROM queue_executions q WHERE q.tenant_id = t.tenant_id"
        " AND q.subscription = t.subscription AND q.message_id = t.message_id)"
    ),
)
_QUOTAS = _Rule(
    table="quotas",
    key="tenant_id, name",
    over=f"t.window_start + t.window_us * interval '1 microsecond' < {_BEFORE}",
)
_DELIVERIES = _Rule(
    table="deliveries",
    key="id",
    over=(
        f"(t.status = 'sent' AND coalesce(t.last_attempt_at, t.created_at) < {_BEFORE}"
        f" OR t.status = 'discarded' AND t.due_at < {_BEFORE})"
    ),
)
_WINDOWS = _Rule(table="send_windows", key="key", over=f"t.ends_at < {_BEFORE}")
_WINDOWS_DAYS = 1.0
_DEAD_LETTERS = _Rule(
    table="dead_letters", key="id", over=f"t.state <> 'open' AND t.settled_at < {_BEFORE}"
)
_METRICS = _Rule(table="queue_metrics", key="id", over=f"t.timestamp < {_BEFORE}")

_TASKS_GO = (
    "WITH gone AS (DELETE FROM queue_executions WHERE (tenant_id, subscription, message_id) IN"
    f" (SELECT t.tenant_id, t.subscription, t.message_id FROM {_TASKS.table} t"
    f" WHERE t.tenant_id = $2 AND t.queue_name = $3 AND t.started_at < {_BEFORE}"
    f" AND {_TASKS.over} ORDER BY t.started_at LIMIT {BATCH} FOR UPDATE SKIP LOCKED)"
    " RETURNING tenant_id, subscription, message_id),"
    " effects_gone AS (DELETE FROM effects e USING gone g WHERE e.tenant_id = g.tenant_id"
    " AND e.subscription = g.subscription AND e.message_id = g.message_id)"
    " SELECT count(*) FROM gone"
)
"""In the order of the index: in any other, all that may go would be sorted for each batch, in the
end for longer than a statement may take. Nobody is waited for, so locks need no order."""
_ROWS_GO = (
    "WITH gone AS (DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} t"
    f" WHERE {{over}} LIMIT {BATCH} FOR UPDATE SKIP LOCKED) RETURNING 1)"
    " SELECT count(*) FROM gone"
)
_KEY_TENANTS = (
    "WITH RECURSIVE t (id) AS (SELECT min(tenant_id) FROM idempotency_keys UNION ALL"
    " SELECT (SELECT min(tenant_id) FROM idempotency_keys WHERE tenant_id > t.id) FROM t"
    " WHERE t.id IS NOT NULL) SELECT id FROM t WHERE id IS NOT NULL"
)
_KEYS_GO = (
    "WITH gone AS (DELETE FROM idempotency_keys k USING (SELECT tenant_id, subscription, key"
    f" FROM idempotency_keys WHERE tenant_id = $1 AND expires_at <= {BEGUN} AND state = 'done'"
    f" ORDER BY expires_at LIMIT {BATCH} FOR UPDATE SKIP LOCKED) o WHERE k.tenant_id = o.tenant_id"
    " AND k.subscription = o.subscription AND k.key = o.key RETURNING 1) SELECT count(*) FROM gone"
)


class Retention:
    """One step removes all that may go. Run it under the role `retention`."""

    def __init__(self, store: PostgresStore, keep: Keep) -> None:
        self._store = store
        self._tasks_days = keep.tasks_days
        self._rules = [
            (rule, days)
            for rule, days in (
                (_APPROVALS, keep.tasks_days),
                (_QUOTAS, keep.tasks_days),
                (_DELIVERIES, keep.deliveries_days),
                (_WINDOWS, _WINDOWS_DAYS),
                (_DEAD_LETTERS, keep.dead_letters_days),
                (_METRICS, keep.metrics_days),
            )
            if days is not None
        ]

    async def step(self, worker: Worker) -> dict[str, int]:
        """Returns how many rows went, by table."""
        if self._store.expiry_paused:  # while the clock jumps about, nobody knows what is over
            return {}
        gone = {"idempotency_keys": await self._expired_keys()}
        if self._tasks_days is not None:
            gone[_TASKS.table] = await self._old_tasks(self._tasks_days)
        for rule, days in self._rules:
            statement = _ROWS_GO.format(table=rule.table, key=rule.key, over=rule.over)
            gone[rule.table] = await self._repeat(statement, str(days))
        if any(gone.values()):
            log.info("retention: %s", ", ".join(f"{n} {t}" for t, n in gone.items() if n))
        return gone

    async def _expired_keys(self) -> int:
        gone = 0
        for (tenant,) in await self._store.read(_KEY_TENANTS):
            gone += await self._repeat(_KEYS_GO, tenant)
        return gone

    async def _old_tasks(self, days: float) -> int:
        gone = 0
        for tenant, queue in await self._store.read(QUEUES):
            gone += await self._repeat(_TASKS_GO, str(days), tenant, queue)
        return gone

    async def _repeat(self, statement: str, *values: str) -> int:
        """Batch by batch, until one is not full."""
        gone = 0
        while True:
            n = await self._delete(statement, *values)
            gone += n
            if n < BATCH:
                return gone

    async def _delete(self, statement: str, *values: str) -> int:
        async def op(tx: Tx, change: Change) -> int:
            ((n,),) = await tx.rows(statement, *values)
            return int(n)

        # Not synced: a deletion that a crash of the server takes back is made again.
        return await self._store.write(op, worker_id=0, durable=False)
