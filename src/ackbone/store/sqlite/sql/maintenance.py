"""Statements of the modules that look after the store."""

from ackbone.core.quota import WAITS_FOR
from ackbone.store.conditions import UNCOMMON
from ackbone.store.retention import BATCH
from ackbone.store.seals import TENANT
from ackbone.store.statements import MaintenanceSql

from .operations import TASK

MAINTENANCE = MaintenanceSql(
    outbox_due=(
        "SELECT hex(id), tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
        " ordering_key, ttl_us FROM outbox WHERE due_at <= ?2 ORDER BY due_at, id LIMIT ?1"
    ),
    outbox_delete="DELETE FROM outbox WHERE id IN (SELECT id_of(value) FROM json_each(?1))",
    outbox_wait=(
        "UPDATE outbox SET due_at = ?2 WHERE id IN (SELECT id_of(value) FROM json_each(?1))"
    ),
    copies_due=(
        "SELECT tenant_id, message_id FROM queue_executions WHERE status = 'open'"
        f" AND {UNCOMMON} AND subscription = ?1 AND due_at <= ?4 - ?2 ORDER BY due_at LIMIT ?3"
    ),
    end_copy=(
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, completed_at = ?4,"
        f" error_message = ?5 WHERE {TASK} AND status = 'open' AND due_at <= ?6"
        " RETURNING tenant_id, subscription, message_id, queue_name, event_name, attempt, crashes,"
        " idem_key, history, trace_id"
    ),
    add_metric=(
        "INSERT INTO queue_metrics (id, tenant_id, queue_name, metric_name, metric_value,"
        " timestamp, tags) VALUES (id_of(?1), ?2, ?3, ?4, ?5, ?6, ?7)"
    ),
    approvals_due="SELECT 1 FROM approvals WHERE state = 'pending' AND expires_at <= ?1 LIMIT 1",
    forget_quota_waits="UPDATE quotas SET deferred_until = NULL, deferred = 0",
    look_at_quotas_again=(
        "UPDATE queue_executions SET due_at = ?1 WHERE status = 'ready' AND due_at > ?1"
        f" AND error_message GLOB '{WAITS_FOR}*' RETURNING 1"
    ),
    tenants_with_keys=(
        "WITH RECURSIVE t (id) AS (SELECT min(tenant_id) FROM idempotency_keys UNION ALL"
        " SELECT (SELECT min(tenant_id) FROM idempotency_keys WHERE tenant_id > t.id) FROM t"
        " WHERE t.id IS NOT NULL) SELECT id FROM t WHERE id IS NOT NULL"
    ),
    delete_expired_keys=(
        "DELETE FROM idempotency_keys WHERE rowid IN (SELECT rowid FROM idempotency_keys"
        f" WHERE tenant_id = ?2 AND expires_at <= ?1 AND state = 'done' LIMIT {BATCH}) RETURNING 1"
    ),
    seals=(
        f"SELECT data FROM event_log WHERE tenant_id = '{TENANT}' AND task_id = ?1"
        " ORDER BY rowid DESC LIMIT ?2"
    ),
)
