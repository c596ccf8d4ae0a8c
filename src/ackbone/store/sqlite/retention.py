"""Retention: what is over and old enough goes, a few rows at a time, so that no writer waits long.

| what             | goes when                                                                   |
|------------------|-----------------------------------------------------------------------------|
| idempotency keys | their window is over; never while their message runs                        |
| tasks, effects   | ended `tasks_days` ago; not while a dead letter of theirs is open           |
| approvals        | answered `tasks_days` ago, and their task is gone                           |
| quotas           | nothing was counted under them for `tasks_days`                             |
| deliveries       | sent or discarded `deliveries_days` ago                                     |
| send windows     | they have said nothing any more for a day                                   |
| dead letters     | replayed or discarded `dead_letters_days` ago                               |
| metrics          | written `metrics_days` ago                                                  |
| files of workers | their process is gone                                                       |

Nothing goes while the clock is in doubt. Events are `prune.py`'s. What is asked for is found by
readers; each deletion asks again, inside its transaction, whether it still holds.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ackbone.core.store import Worker
from ackbone.store.keep import DAY_US, Keep
from ackbone.store.stored import FINAL_WORDS

from .prune import BATCH
from .store import SqliteStore

log = logging.getLogger("ackbone.store")

PAGE = 5000
"""Rows that one reading looks at."""


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One table: which rows may go, given the moment `?1` before which things are old."""

    table: str
    over: str
    born: str
    """When the row was made: rows of one table are in about that order."""


_TASKS = _Rule(
    table="queue_executions",
    over=(
        f"t.status IN {FINAL_WORDS} AND t.completed_at < ?1 AND NOT EXISTS (SELECT 1"
        " FROM dead_letters d WHERE d.tenant_id = t.tenant_id AND d.message_id = t.message_id"
        " AND d.subscription = t.subscription AND d.state = 'open')"
    ),
    born="t.started_at",
)
_APPROVALS = _Rule(
    table="approvals",
    over=(
        "t.state <> 'pending' AND t.answered_at < ?1 AND NOT EXISTS (SELECT 1 FROM queue_executions"
        " q WHERE q.tenant_id = t.tenant_id AND q.subscription = t.subscription"
        " AND q.message_id = t.message_id)"
    ),
    born="t.asked_at",
)
_QUOTAS = _Rule(table="quotas", over="t.window_start + t.window_us < ?1", born="t.window_start")
_DELIVERIES = _Rule(
    table="deliveries",
    over=(
        "(t.status = 'sent' AND coalesce(t.last_attempt_at, t.created_at) < ?1"
        " OR t.status = 'discarded' AND t.due_at < ?1)"
    ),
    born="t.created_at",
)
_WINDOWS = _Rule(table="send_windows", over="t.ends_at < ?1", born="t.ends_at")
_WINDOWS_DAYS = 1.0
_DEAD_LETTERS = _Rule(
    table="dead_letters", over="t.state != 'open' AND t.settled_at < ?1", born="t.failed_at"
)
_METRICS = _Rule(table="queue_metrics", over="t.timestamp < ?1", born="t.timestamp")

_TENANTS_WITH_KEYS = (
    "WITH RECURSIVE t (id) AS (SELECT min(tenant_id) FROM idempotency_keys UNION ALL"
    " SELECT (SELECT min(tenant_id) FROM idempotency_keys WHERE tenant_id > t.id) FROM t"
    " WHERE t.id IS NOT NULL) SELECT id FROM t WHERE id IS NOT NULL"
)
"""From tenant to tenant through the index, without reading the keys."""
_EXPIRED_KEYS = (
    "SELECT rowid FROM idempotency_keys WHERE tenant_id = ? AND expires_at <= ?"
    " AND state = 'done' LIMIT ?"
)
_DELETE_EXPIRED_KEYS = f"DELETE FROM idempotency_keys WHERE rowid IN ({_EXPIRED_KEYS})"


class Retention:
    """One step removes all that may go. Run it under the role `retention`."""

    def __init__(self, store: SqliteStore, keep: Keep) -> None:
        self._store = store
        self._rules = [
            (rule, days)
            for rule, days in (
                (_TASKS, keep.tasks_days),
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
        gone = {"idempotency_keys": await self._expired_keys()}
        for rule, days in self._rules:
            gone[rule.table] = await self._apply(rule, int(days * DAY_US))
        await asyncio.to_thread(self._tidy)
        if any(gone.values()):
            log.info("retention: %s", ", ".join(f"{n} {t}" for t, n in gone.items() if n))
        return gone

    # -- keys -------------------------------------------------------------------------------------

    async def _expired_keys(self) -> int:
        store = self._store
        tenants = await store.file.read(
            lambda conn: [tenant for (tenant,) in conn.execute(_TENANTS_WITH_KEYS)]
        )
        gone = 0
        for tenant in tenants:
            n = BATCH
            while n == BATCH:
                n = await self._delete(partial(self._delete_keys, tenant=tenant))
                gone += n
        return gone

    def _delete_keys(self, conn: sqlite3.Connection, now_us: int, *, tenant: str) -> int:
        return conn.execute(_DELETE_EXPIRED_KEYS, (tenant, now_us, BATCH)).rowcount

    # -- tables -----------------------------------------------------------------------------------

    async def _apply(self, rule: _Rule, keep_us: int) -> int:
        """From the oldest row on, page by page, until a whole page is too young."""
        gone = after = 0
        while True:
            page = await self._page(rule, self._now_us() - keep_us, after)
            over = [rowid for rowid, may_go, _ in page if may_go]
            for at in range(0, len(over), BATCH):
                some = over[at : at + BATCH]
                gone += await self._delete(
                    partial(_delete_rows, rule=rule, rowids=some, keep_us=keep_us)
                )
            if len(page) < PAGE or all(young for _, _, young in page):
                return gone
            after = page[-1][0]

    async def _page(self, rule: _Rule, before_us: int, after: int) -> list[tuple[int, int, int]]:
        """Rows behind `after`: rowid, may it go, is it too young."""
        return await self._store.file.read(
            lambda conn: conn.execute(
                f"SELECT t.rowid, {rule.over}, {rule.born} >= ?1 FROM {rule.table} t"
                " WHERE t.rowid > ?2 ORDER BY t.rowid LIMIT ?3",
                (before_us, after, PAGE),
            ).fetchall()
        )

    async def _delete(self, op: Callable[[sqlite3.Connection, int], int]) -> int:
        """`op` is given the time of its transaction: what it looks at has moved with the clock."""
        # Not synced: a deletion that a power cut takes back is made again.
        return await self._store.file.write(lambda conn: op(conn, self._now_us()), durable=False)

    def _now_us(self) -> int:
        """Nothing is old while the clock is in doubt: who knows a message by its row must not
        forget it because somebody set the clock for a minute."""
        return self._store.expiry_us(self._store.clock.now_us())

    # -- files ------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        file = self._store.file
        known = file.read_sync(
            lambda conn: {
                w for (w,) in conn.execute("SELECT worker_id FROM workers WHERE state = 'alive'")
            }
        )
        file.tidy(known)


def _delete_rows(
    conn: sqlite3.Connection, now_us: int, *, rule: _Rule, rowids: Sequence[int], keep_us: int
) -> int:
    values = (now_us - keep_us, msgspec.json.encode(rowids).decode())
    these = f"t.rowid IN (SELECT value FROM json_each(?2)) AND {rule.over}"
    if rule is _TASKS:
        conn.execute(
            "DELETE FROM effects WHERE (tenant_id, subscription, message_id) IN (SELECT"
            f" t.tenant_id, t.subscription, t.message_id FROM queue_executions t WHERE {these})",
            values,
        )
    return conn.execute(f"DELETE FROM {rule.table} AS t WHERE {these}", values).rowcount
