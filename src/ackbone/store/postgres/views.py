"""Statements of the looking side, with columns as `ackbone.store.seen` reads them."""

from __future__ import annotations

from ackbone.store.stored import UNCOMMON


def us(column: str) -> str:
    """A time as integer microseconds."""
    return f"(extract(epoch FROM {column}) * 1000000)::bigint"


_BODY, _NO_BODY = "body, body_info::text, body_crc", "NULL::bytea, body_info::text, NULL::bigint"
_LETTER = (
    "SELECT uuid_send(id), tenant_id, subscription, message_id, queue_name, event_name, reason,"
    f" error, retry_count, state, {us('failed_at')}, {us('settled_at')}, replay_id, history::text,"
    " {} FROM dead_letters"
)
LETTER, LETTER_HEAD = _LETTER.format(_BODY), _LETTER.format(_NO_BODY)
_TASK = (
    "SELECT uuid_send(id), tenant_id, subscription, message_id, queue_name, event_name, status,"
    f" held, worker_id, attempt, crashes, retry_count, priority, {us('created_at')},"
    f" {us('started_at')}, {us('completed_at')}, {us('due_at')}, {us('expires_at')}, duration_ms,"
    " parked_kind, error_message, lane, idem_key, correlation_id, trace_id, history::text, result,"
    " {} FROM queue_executions"
)
TASK, TASK_HEAD = _TASK.format(_BODY), _TASK.format(_NO_BODY)
EVENT = (
    f"SELECT uuid_send(id), {us('created_at')}, event_type, tenant_id, subscription, task_id,"
    " worker_id, seq, data::text FROM event_log"
)
REPLY = (
    "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, status, retry_count,"
    f" {us('created_at')}, {us('last_attempt_at')}, last_error, in_doubt <> 0"
    " FROM deliveries"
)
EFFECT = (
    f"SELECT name, state, value, worker_id, {us('created_at')}, {us('done_at')} FROM effects"
    " WHERE tenant_id = $1 AND message_id = $2 ORDER BY created_at, name"
)
LETTER_FILTER = (
    "($3::text IS NULL OR queue_name = $3) AND ($4::text IS NULL OR reason = $4)"
    " AND ($5::text IS NULL OR tenant_id = $5) AND ($6::bigint IS NULL OR failed_at >="
    " timestamptz 'epoch' + $6::bigint * interval '1 microsecond')"
    " AND ($7::text IS NULL OR state = $7) AND ($8::text IS NULL OR event_name = $8)"
    " AND ($9::text IS NULL OR strpos(error, $9) > 0) AND ($10::bigint IS NULL OR failed_at <"
    " timestamptz 'epoch' + $10::bigint * interval '1 microsecond')"
)
UNENDED = (
    # The second condition is the one of a partial index over what is neither running nor ended.
    "SELECT queue_name, count(*) FILTER (WHERE status <> 'parked'),"
    " count(*) FILTER (WHERE status = 'parked'), min(started_at) FILTER (WHERE status <> 'parked'"
    " AND coalesce(due_at, timestamptz 'epoch') <= clock_timestamp()) FROM queue_executions"
    f" WHERE status IN ('ready', 'queued', 'waiting_key', 'open', 'parked') AND {UNCOMMON}"
    " GROUP BY queue_name"
)
UNSENT = (
    "SELECT queue_name, count(*) FILTER (WHERE due_at <= clock_timestamp()),"
    " count(*) FILTER (WHERE due_at > clock_timestamp()),"
    " min(created_at) FILTER (WHERE due_at <= clock_timestamp()) FROM outbox GROUP BY queue_name"
)
"""What the broker was not given yet: not due, or it is away."""
WORKERS = (
    f"SELECT w.worker_id, w.name, {us('w.started_at')}, w.lease_until >= clock_timestamp(),"
    " (SELECT count(*) FROM queue_executions q WHERE q.worker_id = w.worker_id"
    " AND q.status = 'running'), w.offers FROM workers w WHERE w.state = 'alive'"
    " ORDER BY w.worker_id"
)
TENANTS = (
    # As many steps through an index as there are tenants.
    "WITH RECURSIVE t (name) AS (SELECT min(tenant_id) FROM {0} UNION ALL SELECT"
    " (SELECT min(tenant_id) FROM {0} WHERE tenant_id > t.name) FROM t"
    " WHERE t.name IS NOT NULL) SELECT name FROM t WHERE name IS NOT NULL"
)
QUEUES = (
    "WITH RECURSIVE q (tenant, queue) AS ((SELECT tenant_id, queue_name FROM queue_executions"
    " ORDER BY tenant_id, queue_name LIMIT 1) UNION ALL SELECT n.tenant_id, n.queue_name FROM q"
    " CROSS JOIN LATERAL (SELECT t.tenant_id, t.queue_name FROM queue_executions t"
    " WHERE (t.tenant_id, t.queue_name) > (q.tenant, q.queue)"
    " ORDER BY t.tenant_id, t.queue_name LIMIT 1) n) SELECT tenant, queue FROM q"
)
"""From queue to queue through the index, without reading the tasks."""
BELONGS = (
    "SELECT tenant_id, message_id, CASE $1 WHEN correlation_id THEN 'correlation id'"
    " WHEN trace_id THEN 'trace id' ELSE 'idempotency key' END FROM queue_executions"
    " WHERE (correlation_id = $1 OR trace_id = $1 OR idem_key = $1)"
    " AND ($2::text IS NULL OR tenant_id = $2) ORDER BY id LIMIT $3::int"
)
