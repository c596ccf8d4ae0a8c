"""Statements of `ackbone.store.base`, `commit` and `workers`, and of what looks after the store:
`outbox`, `upkeep`, `retention` and `anchors`."""

from __future__ import annotations

import msgspec

from ackbone.core.quota import WAITS_FOR
from ackbone.store.conditions import TASK, UNCOMMON

from .records import TENANTS

# All history is in the table, so every part of `busy` and `stuck` is answered by an index. UNCOMMON
# repeats the words of a partial index, or it would not be used.
OURS = "subscription = ANY($1::text[])"
SENT = (
    "EXISTS (SELECT 1 FROM outbox WHERE queue_name = ANY($1::text[]))"
    " OR EXISTS (SELECT 1 FROM messages WHERE queue = ANY($1::text[]))"
)
"""Anything of the subscriptions was sent and not taken. The broker's queue may be in the same
database."""
_RUNNING = f"EXISTS (SELECT 1 FROM queue_executions WHERE status = 'running' AND {OURS})"
_AMONG = f"FROM queue_executions WHERE status IN ({{}}) AND {UNCOMMON} AND {OURS}"
_WAITING = _AMONG.format("'ready', 'queued', 'waiting_key', 'open'")
_READY = _AMONG.format("'ready'")
_BEHIND = _AMONG.format("'queued', 'waiting_key', 'open'")


class StoreSql(msgspec.Struct, frozen=True, kw_only=True):
    to_cancel: str = (
        "SELECT tenant_id, subscription, message_id FROM queue_executions"
        " WHERE worker_id = $1::bigint AND status = 'running' AND cancel_at IS NOT NULL"
    )
    """worker → the tasks that it runs and that are to be cancelled"""
    suspects_due: str
    """subscriptions → subscription, type, how many run in a small group, how many run alone; by
    `read_due`"""
    next_due: str
    """subscription, now → microseconds until the next task that the store holds is due, of those
    that are not yet; the database's own time where none is given"""
    paused: str = "SELECT subscription FROM sources WHERE paused_at IS NOT NULL"
    """→ subscriptions"""
    busy: str = f"SELECT {SENT} OR {_RUNNING} OR EXISTS (SELECT 1 {_WAITING})"
    """subscriptions → whether anything of them waits, runs or is due later, parked messages
    aside"""
    stuck: str = (
        f"SELECT CASE WHEN {SENT} OR {_RUNNING} OR EXISTS (SELECT 1 {_READY}) THEN 0"
        f" ELSE (SELECT count(*) {_BEHIND}) END"
    )
    """subscriptions → how many messages are left, if nothing is ready and nothing runs. Such a
    message waits for a parked one, or for one whose copy is with the broker."""
    holds_role: str = "SELECT 1 FROM roles WHERE role = $1 AND worker_id = $2::bigint"
    """role, worker → a row if the worker holds it"""
    take_role: str = (
        "INSERT INTO roles (role, worker_id) VALUES ($1, $2::bigint) ON CONFLICT (role)"
        " DO UPDATE SET worker_id = excluded.worker_id WHERE roles.worker_id = excluded.worker_id"
        " OR roles.worker_id IS NULL OR roles.worker_id NOT IN"
        " (SELECT worker_id FROM workers WHERE state = 'alive') RETURNING 1"
    )
    """role, worker → a row if the role was free"""
    identity: str
    """→ the id of this store, if it has one"""
    set_identity: str
    """id"""
    ended_tasks: str
    """tasks as a JSON array of [tenant, subscription, message id] → task, event_name, result,
    retry_count, error_message, idem_key, name of the worker that ran it"""


RUNNING = (
    "SELECT q.tenant_id, q.subscription, q.message_id, q.queue_name, q.event_name, q.trace_id,"
    " q.worker_id, w.state, w.name, q.attempt, q.crashes, q.idem_key, q.lane, q.history::text,"
    " q.body, q.body_info::text FROM queue_executions q LEFT JOIN workers w"
    " ON w.worker_id = q.worker_id WHERE q.status = 'running'"
)
GONE = "coalesce(w.state, 'left') IN ('dead', 'left')"


class WorkersSql(msgspec.Struct, frozen=True, kw_only=True):
    name: str = "SELECT name FROM workers WHERE worker_id = $1::bigint"
    """worker → its name"""
    offers: str
    """grace (µs), now → the `offers` of all workers that are present, or ended a moment ago; the
    database's own time where none is given. After the clock was set back, an end in the future is
    no recent one."""
    announce: str = "UPDATE workers SET offers = $2 WHERE worker_id = $1::bigint"
    """worker, offers"""
    leaving: str = (
        "UPDATE workers SET state = 'leaving' WHERE worker_id = $1::bigint AND state = 'alive'"
    )
    """worker"""
    end: str = (
        "UPDATE workers SET state = $2, ended_at = at($3) WHERE worker_id = $1::bigint"
        " AND state IN ('alive', 'leaving')"
    )
    """worker, state (`left` or `dead`), now"""
    forget: str = "DELETE FROM workers WHERE worker_id = $1::bigint AND state = 'left'"
    """worker: delete its row, if it has left"""
    ended: str = (
        "SELECT name FROM workers WHERE name = ANY($1::text[]) GROUP BY name"
        " HAVING count(*) FILTER (WHERE state IN ('alive', 'leaving')) = 0"
    )
    """list of names → those whose workers have died or left"""
    free_sources: str = (  # a part is taken over whoever has it
        "UPDATE sources SET worker_id = NULL WHERE worker_id = $1::bigint AND part = ''"
    )
    """worker"""
    running: str
    """worker → the columns of `workers.Running`, locked; the worker has left"""
    running_of_the_gone: str
    """→ the same, of all workers that are not there any more"""
    give_back: str = (
        "UPDATE queue_executions SET status = CASE held WHEN 'store' THEN 'ready' ELSE 'open' END,"
        " worker_id = NULL, epoch = epoch + 1, crashes = $4::int, attempt = $5::int,"
        " history = coalesce($6, history::text)::json, lost_by = coalesce($7, lost_by),"
        f" due_at = at($8) WHERE {TASK}"
    )
    """task, crashes, attempt, history or NULL, lost_by or NULL, now"""
    quarantine: str = (
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, crashes = $4::int,"
        " error_message = $5, history = $6::json, completed_at = at($7), body = NULL"
        f" WHERE {TASK}"
    )
    """task, crashes, error, history, now"""


class MaintenanceSql(msgspec.Struct, frozen=True, kw_only=True):
    """`BaseStore.read_due` runs those that end in `_due`."""

    outbox_due: str
    """limit, queues to leave out → the columns of `outbox.Row`, the oldest first; the id is a
    text"""
    outbox_delete: str = "DELETE FROM outbox WHERE id = ANY($1::uuid[])"
    """ids"""
    outbox_wait: str = "UPDATE outbox SET due_at = at($2) WHERE id = ANY($1::uuid[])"
    """ids, due_at"""

    copies_due: str
    """subscription, µs, limit → tenant, message id of tasks that have waited this long for their
    broker copy, the oldest first"""
    end_copy: str = (
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, completed_at = at($4),"
        f" error_message = $5 WHERE {TASK} AND status = 'open' AND due_at <= at($6)"
        " RETURNING tenant_id, subscription, message_id, queue_name, event_name, trace_id, attempt,"
        " crashes, idem_key, history::text"
    )
    """task, now, error, due before → the columns of `upkeep.Lost`, if the task still waits"""

    add_metric: str = (
        "INSERT INTO queue_metrics (id, tenant_id, queue_name, metric_name, metric_value,"
        " timestamp, tags) VALUES ($1::uuid, $2, $3, $4, $5::float8, at($6), $7::json)"
    )
    """id, tenant, queue, name, value, now, tags (JSON)"""

    approvals_due: str
    """→ a row if an approval expired and nobody has ended it"""
    forget_quota_waits: str = "UPDATE quotas SET deferred_until = NULL, deferred = 0"
    """no quota is known to be exhausted any more"""
    look_at_quotas_again: str = (
        "UPDATE queue_executions SET due_at = at($1) WHERE status = 'ready' AND due_at > at($1)"
        f" AND starts_with(error_message, '{WAITS_FOR}') RETURNING 1"
    )
    """now → a row for each task that waited for a quota and is ready now"""

    tenants_with_keys: str = TENANTS.format("idempotency_keys")
    """→ tenant, for each that has idempotency keys; read through the index, without the keys"""
    delete_expired_keys: str
    """now, tenant → a row for each key that was deleted, at most `retention.BATCH`"""

    forget_workers: str = (
        "DELETE FROM workers WHERE state IN ('left', 'dead') AND ended_at < at($1)"
    )
    """time: forget the workers that ended before it"""
    seals: str
    """task of the tenant `_ledger`, limit → data, the newest first"""
