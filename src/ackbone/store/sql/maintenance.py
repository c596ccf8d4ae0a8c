"""Statements of the modules that look after the store: `outbox`, `copies`, `metric_rows`,
`governance`, `retention` and `anchors`."""

from __future__ import annotations

import msgspec

from ackbone.core.quota import WAITS_FOR
from ackbone.store.conditions import TASK

from .records import TENANTS


class MaintenanceSql(msgspec.Struct, frozen=True, kw_only=True):
    """`UnitOfWork.read_due` runs those that end in `_due`."""

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
        " RETURNING tenant_id, subscription, message_id, queue_name, event_name, attempt, crashes,"
        " idem_key, history::text, trace_id"
    )
    """task, now, error, due before → the columns of `copies.Lost`, if the task still waits"""

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

    seals: str
    """task of the tenant `_ledger`, limit → data, the newest first"""
