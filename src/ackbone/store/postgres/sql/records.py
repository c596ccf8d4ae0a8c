"""Statements of `ackbone.store.records` and `endings`, and of `ackbone.store.postgres.records`."""

from ackbone.core.quota import WAITS_FOR
from ackbone.store.conditions import UNCOMMON
from ackbone.store.endings import FINAL_EVENTS
from ackbone.store.postgres.arrays import moment, us
from ackbone.store.statements import RecordsSql

_LETTER = (
    "SELECT uuid_send(id), tenant_id, subscription, message_id, queue_name, event_name, reason,"
    f" error, retry_count, state, {us('failed_at')}, {us('settled_at')}, replay_id, history::text,"
    " {} FROM dead_letters"
)
_TASK = (
    "SELECT uuid_send(id), tenant_id, subscription, message_id, queue_name, event_name, status,"
    f" held, worker_id, attempt, crashes, retry_count, priority, {us('created_at')},"
    f" {us('started_at')}, {us('completed_at')}, {us('due_at')}, {us('expires_at')}, duration_ms,"
    " parked_kind, error_message, lane, idem_key, correlation_id, trace_id, history::text, result,"
    " {} FROM queue_executions"
)
_BODY, _NO_BODY = "body, body_info::text, body_crc", "NULL::bytea, body_info::text, NULL::bigint"
LETTER, LETTER_HEAD = _LETTER.format(_BODY), _LETTER.format(_NO_BODY)
TASK, TASK_HEAD = _TASK.format(_BODY), _TASK.format(_NO_BODY)
EVENT = (
    f"SELECT uuid_send(id), {us('created_at')}, event_type, tenant_id, subscription, task_id,"
    " worker_id, seq, data::text FROM event_log"
)
_LETTER_FILTER = (
    "($2::uuid IS NULL OR id < $2::uuid) AND ($3::text IS NULL OR queue_name = $3)"
    " AND ($4::text IS NULL OR reason = $4) AND ($5::text IS NULL OR tenant_id = $5)"
    f" AND ($6::bigint IS NULL OR failed_at >= {moment('$6::bigint')})"
    " AND ($7::text IS NULL OR state = $7) AND ($8::text IS NULL OR event_name = $8)"
    " AND ($9::text IS NULL OR strpos(error, $9) > 0)"
    f" AND ($10::bigint IS NULL OR failed_at < {moment('$10::bigint')})"
)
_OF_TENANT = "($2::text IS NULL OR tenant_id = $2)"
NAMED = (
    f"WHERE {_OF_TENANT} AND (id = $1::uuid OR message_id = $4::text)"
    " ORDER BY id DESC LIMIT $3::int"
)
NAMED_LIKE = (
    f'WHERE {_OF_TENANT} AND (message_id COLLATE "C" BETWEEN $1::text AND $4::text'
    " OR replace(id::text, '-', '') BETWEEN $5::text AND $6::text)"
    " ORDER BY id DESC LIMIT $3::int"
)
# One step through an index for each tenant.
_TENANTS = (
    "WITH RECURSIVE t (name) AS (SELECT min(tenant_id) FROM {0} UNION ALL SELECT"
    " (SELECT min(tenant_id) FROM {0} WHERE tenant_id > t.name) FROM t"
    " WHERE t.name IS NOT NULL) SELECT name FROM t WHERE name IS NOT NULL"
)
# From queue to queue through an index, without reading the tasks.
QUEUES = (
    "WITH RECURSIVE q (tenant, queue) AS ((SELECT tenant_id, queue_name FROM queue_executions"
    " ORDER BY tenant_id, queue_name LIMIT 1) UNION ALL SELECT n.tenant_id, n.queue_name FROM q"
    " CROSS JOIN LATERAL (SELECT t.tenant_id, t.queue_name FROM queue_executions t"
    " WHERE (t.tenant_id, t.queue_name) > (q.tenant, q.queue)"
    " ORDER BY t.tenant_id, t.queue_name LIMIT 1) n) SELECT tenant, queue FROM q"
)
_FINAL = ", ".join(f"'{each}'" for each in FINAL_EVENTS)
_NOW = moment("$1::bigint")
_WAITS = f"status <> 'parked' AND coalesce(due_at, timestamptz 'epoch') <= {_NOW}"

RECORDS = RecordsSql(
    letters=f"{LETTER_HEAD} WHERE {_LETTER_FILTER} ORDER BY id DESC LIMIT $1::int",
    letter_ids=(
        f"SELECT uuid_send(id) FROM dead_letters WHERE {_LETTER_FILTER}"
        " ORDER BY id LIMIT $1::bigint"
    ),
    letters_named=f"{LETTER} {NAMED}",
    letters_named_like=f"{LETTER} {NAMED_LIKE}",
    letters_by_id=f"{LETTER} WHERE id = ANY($1::uuid[])",
    letters_of=(
        f"{LETTER_HEAD} WHERE tenant_id = $1 AND (message_id = $2 OR replay_id = $2) ORDER BY id"
    ),
    # The second condition on status is the one of a partial index: with it, the index is used.
    parked=(
        f"{TASK_HEAD} WHERE status = 'parked' AND {UNCOMMON}"
        " AND ($1::text IS NULL OR queue_name = $1) AND ($2::text IS NULL OR parked_kind = $2)"
        " AND ($3::text IS NULL OR tenant_id = $3) AND ($4::uuid IS NULL OR id < $4::uuid)"
        " ORDER BY id DESC LIMIT $5::int"
    ),
    tasks=f"{TASK} WHERE tenant_id = $1 AND message_id = $2 ORDER BY id",
    tasks_like=(
        f'{TASK_HEAD} WHERE tenant_id = $1 AND message_id COLLATE "C" BETWEEN $2::text'
        " AND $3::text AND ($4::text IS NULL OR status = $4) ORDER BY message_id LIMIT $5::int"
    ),
    tasks_correlated=f"{TASK_HEAD} WHERE correlation_id = $1 ORDER BY id LIMIT $2::int",
    tenants_of_tasks=_TENANTS.format("queue_executions"),
    tenants_of_events=_TENANTS.format("event_log"),
    find_task=(
        "SELECT DISTINCT message_id FROM queue_executions WHERE tenant_id = $1"
        " AND message_id = $3::text LIMIT $2::int"
    ),
    find_tasks_like=(
        "SELECT DISTINCT message_id FROM queue_executions WHERE tenant_id = $1"
        ' AND message_id COLLATE "C" BETWEEN $3::text AND $4::text LIMIT $2::int'
    ),
    find_event=(
        "SELECT DISTINCT task_id FROM event_log WHERE tenant_id = $1 AND task_id = $3::text"
        " LIMIT $2::int"
    ),
    find_events_like=(
        "SELECT DISTINCT task_id FROM event_log WHERE tenant_id = $1"
        ' AND task_id COLLATE "C" BETWEEN $3::text AND $4::text LIMIT $2::int'
    ),
    find_related=(
        "SELECT tenant_id, message_id, CASE $1 WHEN correlation_id THEN 'correlation id'"
        " WHEN trace_id THEN 'trace id' ELSE 'idempotency key' END FROM queue_executions"
        " WHERE (correlation_id = $1 OR trace_id = $1 OR idem_key = $1)"
        f" AND {_OF_TENANT} ORDER BY id LIMIT $3::int"
    ),
    events_of=f"{EVENT} WHERE tenant_id = $1 AND task_id = $2 ORDER BY created_at, id",
    effects_of=(
        f"SELECT name, state, value, worker_id, {us('created_at')}, {us('done_at')} FROM effects"
        " WHERE tenant_id = $1 AND message_id = $2 ORDER BY created_at, name"
    ),
    replies_of=(
        "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, status,"
        f" retry_count, {us('created_at')}, {us('last_attempt_at')}, last_error, in_doubt"
        " FROM deliveries WHERE tenant_id = $1 AND task_id = $2 ORDER BY created_at, id"
    ),
    queues=QUEUES,
    unsent=(
        f"SELECT queue_name, count(*) FILTER (WHERE due_at <= {_NOW}),"
        f" count(*) FILTER (WHERE due_at > {_NOW}),"
        f" {us(f'min(created_at) FILTER (WHERE due_at <= {_NOW})')} FROM outbox GROUP BY queue_name"
    ),
    # The second condition on status is the one of a partial index.
    unended=(
        "SELECT queue_name, count(*) FILTER (WHERE status <> 'parked'),"
        " count(*) FILTER (WHERE status = 'parked'),"
        f" {us(f'min(started_at) FILTER (WHERE {_WAITS})')} FROM queue_executions"
        " WHERE status IN ('ready', 'queued', 'waiting_key', 'open', 'parked')"
        f" AND {UNCOMMON} GROUP BY queue_name"
    ),
    running=(
        "SELECT queue_name, count(*) FROM queue_executions WHERE status = 'running'"
        " GROUP BY queue_name"
    ),
    open_letters=(
        "SELECT queue_name, count(*) FROM dead_letters WHERE state = 'open' GROUP BY queue_name"
    ),
    paused_queues=(
        f"SELECT subscription, {us('max(paused_at)')} FROM sources GROUP BY subscription"
    ),
    task_counts="SELECT queue_name, status, count(*) FROM queue_executions GROUP BY 1, 2",
    reply_counts="SELECT channel, status, count(*) FROM deliveries GROUP BY 1, 2",
    workers=(
        f"SELECT w.worker_id, w.name, {us('w.started_at')}, w.lease_until >= clock_timestamp(),"
        " (SELECT count(*) FROM queue_executions q WHERE q.worker_id = w.worker_id"
        " AND q.status = 'running'), w.offers FROM workers w WHERE w.state = 'alive'"
        " ORDER BY w.worker_id"
    ),
    quota_use=(
        f"SELECT q.tenant_id, q.name, {us('q.window_start')}, q.window_us, q.runs, q.llm_calls,"
        " q.tokens, q.cost, (SELECT count(*) FROM queue_executions t WHERE t.status = 'ready'"
        f" AND t.tenant_id = q.tenant_id AND t.error_message = '{WAITS_FOR}' || q.name)"
        " FROM quotas q WHERE q.window_us > 0 AND ($1::text IS NULL OR q.tenant_id = $1)"
        " ORDER BY q.tenant_id, q.name"
    ),
    final_events=(
        "SELECT e.tenant_id, e.task_id, e.event_type, e.data::text, (SELECT d.history::text"
        " FROM dead_letters d WHERE d.tenant_id = e.tenant_id AND d.message_id = e.task_id"
        " AND d.subscription = e.subscription ORDER BY d.failed_at DESC LIMIT 1)"
        " FROM unnest($2::text[], $3::text[]) u(tenant, task) JOIN event_log e"
        " ON e.tenant_id = u.tenant AND e.task_id = u.task WHERE e.subscription = $1"
        f" AND e.event_type IN ({_FINAL})"
    ),
)

# ── the ledger as it grows ───────────────────────────────────────────────────────────────────────

NOW = f"SELECT {us('clock_timestamp()')}"
EVENTS_AFTER = (
    f"{EVENT} WHERE created_at >= {moment('$1::bigint')}"
    f" AND (created_at, id) > ({moment('$1::bigint')}, $2::uuid)"
    " ORDER BY created_at, id LIMIT $3::int"
)
EVENT_COUNTS = (
    "SELECT subscription, event_type, count(*) FROM event_log"
    f" WHERE created_at >= {moment('$1::bigint')} GROUP BY 1, 2"
)
LAST_EVENT = (
    f"SELECT uuid_send(id), {us('created_at')} FROM event_log"
    " ORDER BY created_at DESC, id DESC OFFSET $1::int LIMIT 1"
)
