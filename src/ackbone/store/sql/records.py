"""Statements of `ackbone.store.records`, and of `upkeep` for endings."""

from __future__ import annotations

import msgspec

from ackbone.core.quota import WAITS_FOR
from ackbone.store.conditions import UNCOMMON

_LETTER = (
    "SELECT uuid_send(id), tenant_id, subscription, message_id, queue_name, event_name, reason,"
    " error, retry_count, state, us(failed_at), us(settled_at), replay_id, history::text, {}"
    " FROM dead_letters"
)
_TASK = (
    "SELECT uuid_send(placed(id)), tenant_id, subscription, message_id, queue_name, event_name,"
    " status, held, worker_id, attempt, crashes, retry_count, priority, us(created_at),"
    " us(started_at), us(completed_at), us(due_at), us(expires_at), duration_ms, parked_kind,"
    " error_message, lane, idem_key, correlation_id, trace_id, history::text, result, {}"
    " FROM queue_executions"
)
_BODY, _NO_BODY = "body, body_info::text, body_crc", "NULL::bytea, body_info::text, NULL::bigint"
LETTER, LETTER_HEAD = _LETTER.format(_BODY), _LETTER.format(_NO_BODY)
TASK, TASK_HEAD = _TASK.format(_BODY), _TASK.format(_NO_BODY)
EVENT = (
    "SELECT uuid_send(placed(id)), us(created_at), event_type, tenant_id, subscription, task_id,"
    " worker_id, seq, data::text FROM event_log"
)
LETTER_FILTER = (
    "($2::uuid IS NULL OR id < $2::uuid) AND ($3::text IS NULL OR queue_name = $3)"
    " AND ($4::text IS NULL OR reason = $4) AND ($5::text IS NULL OR tenant_id = $5)"
    " AND ($6::bigint IS NULL OR failed_at >= at($6)) AND ($7::text IS NULL OR state = $7)"
    " AND ($8::text IS NULL OR event_name = $8) AND ($9::text IS NULL OR strpos(error, $9) > 0)"
    " AND ($10::bigint IS NULL OR failed_at < at($10))"
)
PARKED = (
    # The second condition on status is the one of a partial index: with it, the index is used.
    f"{TASK_HEAD} WHERE status = 'parked' AND {UNCOMMON}"
    " AND ($1::text IS NULL OR queue_name = $1) AND ($2::text IS NULL OR parked_kind = $2)"
    " AND ($3::text IS NULL OR tenant_id = $3)"
)
_OF_TENANT = "($2::text IS NULL OR tenant_id = $2)"
NAMED = (
    f"WHERE {_OF_TENANT} AND (id = $1::uuid OR message_id = $4::text)"
    " ORDER BY id DESC LIMIT $3::int"
)
NAMED_LIKE = (
    f'WHERE {_OF_TENANT} AND (message_id COLLATE "C" BETWEEN $1::text AND $4::text'
    " OR digits(id) BETWEEN $5::text AND $6::text) ORDER BY id DESC LIMIT $3::int"
)
# One step through an index for each tenant.
TENANT_NAMES = (
    "WITH RECURSIVE t (name) AS (SELECT min(tenant_id) FROM {0} UNION ALL SELECT"
    " (SELECT min(tenant_id) FROM {0} WHERE tenant_id > t.name) FROM t WHERE t.name IS NOT NULL)"
)
TENANTS = f"{TENANT_NAMES} SELECT name FROM t WHERE name IS NOT NULL"


class RecordsSql(msgspec.Struct, frozen=True, kw_only=True):
    """Each statement returns the columns that a builder in `ackbone.store.record_rows` reads, or
    those that are given here. A filter that is NULL lets every row pass."""

    letters: str = f"{LETTER_HEAD} WHERE {LETTER_FILTER} ORDER BY id DESC LIMIT $1::int"
    """limit, before this id, queue, reason, tenant, failed since, state, type, text of the error,
    failed before → dead letters without bodies, the newest first"""
    letter_ids: str = (
        f"SELECT uuid_send(id) FROM dead_letters WHERE {LETTER_FILTER} ORDER BY id LIMIT $1::bigint"
    )
    """the same; a limit that is NULL is no limit → ids, the oldest first"""
    letters_named: str = f"{LETTER} {NAMED}"
    """id, tenant, limit, message id → dead letters, the newest first"""
    letters_named_like: str = f"{LETTER} {NAMED_LIKE}"
    """first and, after tenant and limit, last message id, then the first and last id as hexadecimal
    digits → dead letters, the newest first"""
    letters_by_id: str = f"{LETTER} WHERE id = ANY($1::uuid[])"
    """ids → dead letters in any order"""
    letters_of: str = (
        f"{LETTER_HEAD} WHERE tenant_id = $1 AND (message_id = $2 OR replay_id = $2) ORDER BY id"
    )
    """tenant, message id → dead letters without bodies, the oldest first"""
    parked: str = f"{PARKED} AND ($4::uuid IS NULL OR id < $4::uuid) ORDER BY id DESC LIMIT $5::int"
    """queue, kind, tenant, before this place, limit → tasks without bodies, the newest first"""
    tasks: str = f"{TASK} WHERE tenant_id = $1 AND message_id = $2 ORDER BY placed(id)"
    """tenant, message id → tasks"""
    tasks_like: str = (
        f'{TASK_HEAD} WHERE tenant_id = $1 AND message_id COLLATE "C" BETWEEN $2::text'
        " AND $3::text AND ($4::text IS NULL OR status = $4) ORDER BY message_id LIMIT $5::int"
    )
    """tenant, first and last message id, status, limit → tasks without bodies"""
    tasks_correlated: str = (
        f"{TASK_HEAD} WHERE correlation_id = $1 ORDER BY placed(id) LIMIT $2::int"
    )
    """correlation id, limit → tasks without bodies"""
    tenants_of_tasks: str = TENANTS.format("queue_executions")
    """→ tenants"""
    tenants_of_events: str = TENANTS.format("event_log")
    """→ tenants"""
    find_task: str = (
        "SELECT DISTINCT message_id FROM queue_executions WHERE tenant_id = $1"
        " AND message_id = $3::text LIMIT $2::int"
    )
    """tenant, limit, message id → message id"""
    find_tasks_like: str = (
        "SELECT DISTINCT message_id FROM queue_executions WHERE tenant_id = $1"
        ' AND message_id COLLATE "C" BETWEEN $3::text AND $4::text LIMIT $2::int'
    )
    """tenant, limit, first and last message id → message ids"""
    find_event: str = (
        "SELECT DISTINCT task_id FROM event_log WHERE tenant_id = $1 AND task_id = $3::text"
        " LIMIT $2::int"
    )
    """as `find_task`, in the ledger"""
    find_events_like: str = (
        "SELECT DISTINCT task_id FROM event_log WHERE tenant_id = $1"
        ' AND task_id COLLATE "C" BETWEEN $3::text AND $4::text LIMIT $2::int'
    )
    """as `find_tasks_like`, in the ledger"""
    find_related: str = (
        "SELECT tenant_id, message_id, CASE $1 WHEN correlation_id THEN 'correlation id'"
        " WHEN trace_id THEN 'trace id' ELSE 'idempotency key' END FROM queue_executions"
        " WHERE (correlation_id = $1 OR trace_id = $1 OR idem_key = $1)"
        f" AND {_OF_TENANT} ORDER BY placed(id) LIMIT $3::int"
    )
    """correlation id, trace id or idempotency key; tenant, limit → tenant, message id, which"""
    events_of: str
    """tenant, message id → events, the oldest first"""
    event_counts: str = (
        "SELECT subscription, event_type, count(*) FROM event_log WHERE created_at >= at($1)"
        " GROUP BY 1, 2"
    )
    """time → subscription, event type, number of events since then"""
    effects_of: str = (
        "SELECT name, state, value, worker_id, us(created_at), us(done_at) FROM effects"
        " WHERE tenant_id = $1 AND message_id = $2 ORDER BY created_at, name"
    )
    """tenant, message id → name, state, value, worker_id, created_at, done_at"""
    replies_of: str = (
        "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, status,"
        " retry_count, us(created_at), us(last_attempt_at), last_error, in_doubt"
        " FROM deliveries WHERE tenant_id = $1 AND task_id = $2 ORDER BY created_at, id"
    )
    """tenant, message id → the columns of `Reply`"""
    queues: str
    """→ tenant and queue of all tasks"""
    unsent: str = (
        "SELECT queue_name, count(*) FILTER (WHERE due_at <= at($1)),"
        " count(*) FILTER (WHERE due_at > at($1)),"
        " min(us(created_at)) FILTER (WHERE due_at <= at($1)) FROM outbox GROUP BY queue_name"
    )
    """now → queue, how many are due in the outbox, how many are not, time of the oldest due one"""
    # The second condition on status is the one of a partial index.
    unended: str = (
        "SELECT queue_name, count(*) FILTER (WHERE status <> 'parked'),"
        " count(*) FILTER (WHERE status = 'parked'), min(us(started_at)) FILTER"
        " (WHERE status <> 'parked' AND (due_at IS NULL OR due_at <= at($1)))"
        " FROM queue_executions"
        " WHERE status IN ('ready', 'queued', 'waiting_key', 'open', 'parked')"
        f" AND {UNCOMMON} GROUP BY queue_name"
    )
    """now → queue, how many wait, how many are parked, time of the oldest that waits and is due"""
    running: str = (
        "SELECT queue_name, count(*) FROM queue_executions WHERE status = 'running'"
        " GROUP BY queue_name"
    )
    """→ queue, number of running tasks"""
    open_letters: str = (
        "SELECT queue_name, count(*) FROM dead_letters WHERE state = 'open' GROUP BY queue_name"
    )
    """→ queue, number of open dead letters"""
    paused_queues: str = (
        "SELECT subscription, max(us(paused_at)) FROM sources GROUP BY subscription"
    )
    """→ queue, since when it is paused or NULL"""
    task_counts: str = "SELECT queue_name, status, count(*) FROM queue_executions GROUP BY 1, 2"
    """→ queue, status, number"""
    reply_counts: str = "SELECT channel, status, count(*) FROM deliveries GROUP BY 1, 2"
    """→ channel, status, number"""
    workers: str
    """→ worker_id, name, started_at, whether its lease holds, number of its runs, offers"""
    quota_use: str = (
        "SELECT q.tenant_id, q.name, us(q.window_start), q.window_us, q.runs, q.llm_calls,"
        " q.tokens, q.cost, (SELECT count(*) FROM queue_executions t WHERE t.status = 'ready'"
        f" AND t.tenant_id = q.tenant_id AND t.error_message = '{WAITS_FOR}' || q.name)"
        " FROM quotas q WHERE q.window_us > 0 AND ($1::text IS NULL OR q.tenant_id = $1)"
        " ORDER BY q.tenant_id, q.name"
    )
    """tenant → the columns of `quota_use_of_row`"""
    final_events: str
    """subscription, tenants, task ids → tenant, task id, event_type, data, history of the letter"""
