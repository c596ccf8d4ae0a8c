"""Retention: finished rows that are old enough are deleted, a few at a time, so that no writer
waits long.

| rows             | are deleted when                                                            |
|------------------|-----------------------------------------------------------------------------|
| idempotency keys | their window is over; never while their message runs                        |
| tasks, effects   | the task ended `tasks_days` ago and has no open dead letter                 |
| approvals        | they were answered `tasks_days` ago and their task is deleted               |
| quotas           | nothing was counted under them for `tasks_days`                             |
| deliveries       | they were sent or discarded `deliveries_days` ago                           |
| send windows     | they ended a day ago                                                        |
| parts of sources | no message of the part was adopted for a day                                |
| dead letters     | they were replayed or discarded `dead_letters_days` ago                     |
| metrics          | they were written `metrics_days` ago                                        |

Nothing is deleted while the clock is in doubt: a message that is known by its row must not be
forgotten because somebody set the clock for a minute. Events of the ledger are deleted by
`prune.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from ackbone.core.store import Worker

from .base import BaseStore
from .conditions import FINAL_WORDS
from .ledger import Anchor, Checkpoint, Head, key_id
from .unit import Change, Tx

log = logging.getLogger("ackbone.store")

DAY_US = 86_400_000_000
MARGIN_US = DAY_US
"""A worker that ended this long before an anchor has no event after it, whatever its clock did."""
BATCH = 500
"""Rows that one transaction deletes at most."""


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """How many days finished rows are kept; None: forever."""

    tasks_days: float | None = None
    metrics_days: float | None = None
    deliveries_days: float | None = None
    dead_letters_days: float | None = None
    windows_days: float | None = 1.0


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows `t` of one table may be deleted. `{before}` is the moment before which they are
    old."""

    table: str
    keep: str
    """The field of `Keep` that says for how long."""
    over: str
    key: str
    """The columns that name a row."""
    made: str
    """When the row was made: rows of one table are in about that order."""


TASKS = Rule(
    table="queue_executions",
    keep="tasks_days",
    over=(
        f"t.status IN {FINAL_WORDS} AND t.completed_at < {{before}} AND NOT EXISTS (SELECT 1"
        " FROM dead_letters d WHERE d.tenant_id = t.tenant_id AND d.message_id = t.message_id"
        " AND d.subscription = t.subscription AND d.state = 'open')"
    ),
    key="tenant_id, subscription, message_id",
    made="started_at",
)
"""The effects of a task are deleted with it."""
RULES = (
    TASKS,
    Rule(
        table="approvals",
        keep="tasks_days",
        over=(
            "t.state <> 'pending' AND t.answered_at < {before} AND NOT EXISTS (SELECT 1"
            " FROM queue_executions q WHERE q.tenant_id = t.tenant_id"
            " AND q.subscription = t.subscription AND q.message_id = t.message_id)"
        ),
        key="id",
        made="asked_at",
    ),
    Rule(
        table="quotas",
        keep="tasks_days",
        over="t.window_start + t.window_us * {us} < {before}",
        key="tenant_id, name",
        made="window_start",
    ),
    Rule(
        table="deliveries",
        keep="deliveries_days",
        over=(
            "(t.status = 'sent' AND coalesce(t.last_attempt_at, t.created_at) < {before}"
            " OR t.status = 'discarded' AND t.due_at < {before})"
        ),
        key="id",
        made="created_at",
    ),
    Rule(
        table="send_windows",
        keep="windows_days",
        over="t.ends_at < {before}",
        key="key",
        made="ends_at",
    ),
    # A worker that still reads the part is refused once, and takes it over again.
    Rule(
        table="sources",
        keep="windows_days",
        over="t.part <> '' AND t.adopted_at < {before}",
        key="subscription, part",
        made="adopted_at",
    ),
    Rule(
        table="dead_letters",
        keep="dead_letters_days",
        over="t.state <> 'open' AND t.settled_at < {before}",
        key="id",
        made="failed_at",
    ),
    Rule(
        table="queue_metrics",
        keep="metrics_days",
        over="t.timestamp < {before}",
        key="id",
        made="timestamp",
    ),
)


class OldRows(Protocol):
    """How a dialect finds the rows of a rule without holding up writers."""

    async def delete(self, rule: Rule, keep_us: int) -> int:
        """Delete the rows that the rule lets go; returns how many."""


class Retention:
    """One step deletes every row that may go. Run it under the role `retention`."""

    def __init__(self, store: BaseStore[Any], rows: OldRows, keep: Keep) -> None:
        self._store = store
        self._rows = rows
        kept = ((rule, getattr(keep, rule.keep)) for rule in RULES)
        self._rules = [(rule, int(days * DAY_US)) for rule, days in kept if days is not None]

    async def step(self, worker: Worker) -> dict[str, int]:
        """Returns how many rows were deleted, by table."""
        if self._store.expiry_paused:
            return {}
        gone = {"idempotency_keys": await self._expired_keys()}
        for rule, keep_us in self._rules:
            gone[rule.table] = await self._rows.delete(rule, keep_us)
        if any(gone.values()):
            log.info("retention: %s", ", ".join(f"{n} {t}" for t, n in gone.items() if n))
        return gone

    async def _expired_keys(self) -> int:
        sql, gone = self._store.sql.maintenance, 0
        for (tenant,) in await self._store.read(sql.tenants_with_keys):
            gone += await delete_all(self._store, sql.delete_expired_keys, 0, tenant)
        return gone


async def delete_all(store: BaseStore[Any], statement: str, keep_us: int, *values: Any) -> int:
    """Run a deletion of at most `BATCH` rows until a batch is not full; returns how many rows."""
    gone = 0
    while True:
        n = await delete_some(store, [statement], keep_us, *values)
        gone += n
        if n < BATCH:
            return gone


async def delete_some(
    store: BaseStore[Any], statements: list[str], keep_us: int, *values: Any
) -> int:
    """Run deletions in one transaction; returns how many rows the last one returned. The first
    parameter is the moment before which rows are old, by the time of the transaction."""

    async def op(tx: Tx, change: Change) -> int:
        if store.expiry_paused:  # the clock was set since the rows were looked for
            return 0
        before_us = await tx.moment() - keep_us
        rows = [await tx.rows(statement, before_us, *values) for statement in statements]
        return len(rows[-1])

    # Not synced: a deletion that a crash takes back is made again.
    return await store.write(op, worker_id=0, durable=False)


# -- the ledger -----------------------------------------------------------------------------------


class Pruning:
    """Pruning of the ledger, as far as both dialects do it alike; for the role `retention`."""

    def __init__(self, store: BaseStore[Any], *, key: bytes, keep_days: float) -> None:
        self._store = store
        self._key = key
        self._keep_us = int(keep_days * DAY_US)
        # A checkpoint is an event itself, so it is not written for every minute of old events.
        self._stride_us = min(DAY_US, self._keep_us // 10)

    def _checkpoint_at(self, anchor: Anchor, heads: Iterable[Head]) -> Checkpoint:
        """The signed checkpoint that lists these ends of chains."""
        checkpoint = Checkpoint(
            anchor=anchor.n, at=anchor.at, chains=tuple(heads), key_id=key_id(self._key)
        )
        return checkpoint.sealed(self._key)

    async def _write(self, tx: Tx, change: Change, checkpoint: Checkpoint, follows: str) -> None:
        """Write a checkpoint, and forget the workers that have no event after it."""
        if await self._newest(tx) != follows:
            return  # another process pruned meanwhile, or an earlier attempt of this call did
        change.entries.append(checkpoint.entry())
        tx.before_end(tx.sql.maintenance.forget_workers, checkpoint.at - MARGIN_US)
        logging.getLogger("ackbone.ledger").info(
            "events before anchor %d are pruned", checkpoint.anchor
        )

    async def _newest(self, tx: Any) -> str:
        """Name the newest checkpoint; empty if there is none."""
        raise NotImplementedError
