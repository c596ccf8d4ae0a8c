"""Statements of the modules that look after the store."""

from ackbone.core.quota import WAITS_FOR
from ackbone.store.conditions import UNCOMMON
from ackbone.store.postgres.arrays import MICROSECOND, moment
from ackbone.store.retention import BATCH
from ackbone.store.seals import TENANT
from ackbone.store.statements import MaintenanceSql

from .operations import TASK

_NOW = "(SELECT clock_timestamp())"

MAINTENANCE = MaintenanceSql(
    outbox_due=(
        "SELECT id::text, tenant_id, queue_name, message_id, headers::text, body, body_crc,"
        " priority, ordering_key, ttl_us, clock_timestamp() FROM outbox"
        f" WHERE due_at <= {_NOW} ORDER BY due_at, id LIMIT $1::int"
    ),
    outbox_delete="DELETE FROM outbox WHERE id = ANY($1::uuid[])",
    outbox_wait=(f"UPDATE outbox SET due_at = {moment('$2::bigint')} WHERE id = ANY($1::uuid[])"),
    copies_due=(
        "SELECT tenant_id, message_id, clock_timestamp() FROM queue_executions"
        f" WHERE status = 'open' AND {UNCOMMON} AND subscription = $1"
        f" AND due_at <= {_NOW} - $2::bigint * {MICROSECOND} ORDER BY due_at LIMIT $3::int"
    ),
    end_copy=(
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1,"
        f" completed_at = {moment('$4::bigint')}, error_message = $5 WHERE {TASK}"
        f" AND status = 'open' AND due_at <= {moment('$6::bigint')}"
        " RETURNING tenant_id, subscription, message_id, queue_name, event_name, attempt, crashes,"
        " idem_key, history::text, trace_id"
    ),
    add_metric=(
        "INSERT INTO queue_metrics (id, tenant_id, queue_name, metric_name, metric_value,"
        f" timestamp, tags) VALUES ($1::uuid, $2, $3, $4, $5::float8, {moment('$6::bigint')},"
        " $7::json)"
    ),
    approvals_due=(
        "SELECT clock_timestamp() FROM approvals WHERE state = 'pending'"
        f" AND expires_at <= {_NOW} LIMIT 1"
    ),
    forget_quota_waits="UPDATE quotas SET deferred_until = NULL, deferred = 0",
    look_at_quotas_again=(
        f"UPDATE queue_executions SET due_at = {moment('$1::bigint')} WHERE status = 'ready'"
        f" AND due_at > {moment('$1::bigint')} AND starts_with(error_message, '{WAITS_FOR}')"
        " RETURNING 1"
    ),
    tenants_with_keys=(
        "WITH RECURSIVE t (id) AS (SELECT min(tenant_id) FROM idempotency_keys UNION ALL"
        " SELECT (SELECT min(tenant_id) FROM idempotency_keys WHERE tenant_id > t.id) FROM t"
        " WHERE t.id IS NOT NULL) SELECT id FROM t WHERE id IS NOT NULL"
    ),
    delete_expired_keys=(
        "DELETE FROM idempotency_keys k USING (SELECT tenant_id, subscription, key"
        " FROM idempotency_keys WHERE tenant_id = $2"
        f" AND expires_at <= {moment('$1::bigint')} AND state = 'done' ORDER BY expires_at"
        f" LIMIT {BATCH} FOR UPDATE SKIP LOCKED) o WHERE k.tenant_id = o.tenant_id"
        " AND k.subscription = o.subscription AND k.key = o.key RETURNING 1"
    ),
    seals=(
        f"SELECT data::text FROM event_log WHERE tenant_id = '{TENANT}' AND task_id = $1"
        " ORDER BY created_at DESC, seq DESC LIMIT $2::int"
    ),
)
