"""Statements of `ackbone.store.records` and `endings`, and of `ackbone.store.sqlite.records`."""

from ackbone.core.quota import WAITS_FOR
from ackbone.store.conditions import UNCOMMON
from ackbone.store.endings import FINAL_EVENTS
from ackbone.store.statements import RecordsSql

_LETTER = (
    "SELECT id, tenant_id, subscription, message_id, queue_name, event_name, reason, error,"
    " retry_count, state, failed_at, settled_at, replay_id, history, {} FROM dead_letters"
)
_TASK = (
    "SELECT rowid, tenant_id, subscription, message_id, queue_name, event_name, status, held,"
    " worker_id, attempt, crashes, retry_count, priority, created_at, started_at, completed_at,"
    " due_at, expires_at, duration_ms, parked_kind, error_message, lane, idem_key, correlation_id,"
    " trace_id, history, result, {} FROM queue_executions"
)
_BODY, _NO_BODY = "body, body_info, body_crc", "NULL, body_info, NULL"
LETTER, LETTER_HEAD = _LETTER.format(_BODY), _LETTER.format(_NO_BODY)
TASK, TASK_HEAD = _TASK.format(_BODY), _TASK.format(_NO_BODY)
EVENT = (
    "SELECT rowid, created_at, event_type, tenant_id, subscription, task_id, worker_id, seq, data"
    " FROM event_log"
)
_LETTER_FILTER = (
    "(?3 IS NULL OR queue_name = ?3) AND (?4 IS NULL OR reason = ?4)"
    " AND (?5 IS NULL OR tenant_id = ?5) AND (?6 IS NULL OR failed_at >= ?6)"
    " AND (?7 IS NULL OR state = ?7) AND (?8 IS NULL OR event_name = ?8)"
    " AND (?9 IS NULL OR instr(error, ?9) > 0) AND (?10 IS NULL OR failed_at < ?10)"
)
_OF_TENANT = "(?2 IS NULL OR tenant_id = ?2)"
NAMED = f"WHERE {_OF_TENANT} AND (id = id_of(?1) OR message_id = ?4) ORDER BY id DESC LIMIT ?3"
NAMED_LIKE = (
    f"WHERE {_OF_TENANT} AND (message_id BETWEEN ?1 AND ?4"
    " OR lower(hex(id)) BETWEEN ?5 AND ?6) ORDER BY id DESC LIMIT ?3"
)
# One step through an index for each tenant.
_NAMES = (
    "WITH RECURSIVE t (name) AS (SELECT min(tenant_id) FROM {0} UNION ALL SELECT"
    " (SELECT min(tenant_id) FROM {0} WHERE tenant_id > t.name) FROM t WHERE t.name IS NOT NULL)"
)
_TENANTS = f"{_NAMES} SELECT name FROM t WHERE name IS NOT NULL"
# And one for each of its queues. SQLite would read all tasks of a queue to compare two columns at
# once with those of the row before.
_QUEUES = _NAMES.format("queue_executions") + (
    ", q (tenant, queue) AS (SELECT name, (SELECT min(queue_name) FROM queue_executions"
    " WHERE tenant_id = t.name) FROM t WHERE name IS NOT NULL UNION ALL SELECT q.tenant,"
    " (SELECT min(queue_name) FROM queue_executions WHERE tenant_id = q.tenant"
    " AND queue_name > q.queue) FROM q WHERE q.queue IS NOT NULL)"
    " SELECT tenant, queue FROM q WHERE queue IS NOT NULL"
)
_FINAL = ", ".join(f"'{each}'" for each in FINAL_EVENTS)

RECORDS = RecordsSql(
    letters=(
        f"{LETTER_HEAD} WHERE {_LETTER_FILTER} AND (?2 IS NULL OR id < id_of(?2))"
        " ORDER BY id DESC LIMIT ?1"
    ),
    letter_ids=(
        f"SELECT id FROM dead_letters WHERE {_LETTER_FILTER} AND (?2 IS NULL OR id < id_of(?2))"
        " ORDER BY id LIMIT ifnull(?1, -1)"
    ),
    letters_named=f"{LETTER} {NAMED}",
    letters_named_like=f"{LETTER} {NAMED_LIKE}",
    letters_by_id=(f"{LETTER} WHERE id IN (SELECT id_of(value) FROM json_each(?1))"),
    letters_of=(
        f"{LETTER_HEAD} WHERE tenant_id = ?1 AND (message_id = ?2 OR replay_id = ?2) ORDER BY id"
    ),
    # The second condition on status is the one of a partial index, and the sign before rowid keeps
    # SQLite from reading the whole table backwards instead, to save the sorting of a few rows.
    parked=(
        f"{TASK_HEAD} WHERE status = 'parked' AND {UNCOMMON}"
        " AND (?1 IS NULL OR queue_name = ?1) AND (?2 IS NULL OR parked_kind = ?2)"
        " AND (?3 IS NULL OR tenant_id = ?3) AND (?4 IS NULL OR rowid < ?4)"
        " ORDER BY +rowid DESC LIMIT ?5"
    ),
    tasks=f"{TASK} WHERE tenant_id = ?1 AND message_id = ?2 ORDER BY rowid",
    tasks_like=(
        f"{TASK_HEAD} WHERE tenant_id = ?1 AND message_id BETWEEN ?2 AND ?3"
        " AND (?4 IS NULL OR status = ?4) ORDER BY message_id LIMIT ?5"
    ),
    tasks_correlated=f"{TASK_HEAD} WHERE correlation_id = ?1 ORDER BY rowid LIMIT ?2",
    tenants_of_tasks=_TENANTS.format("queue_executions"),
    tenants_of_events=_TENANTS.format("event_log"),
    find_task=(
        "SELECT DISTINCT message_id FROM queue_executions WHERE tenant_id = ?1 AND message_id = ?3"
        " LIMIT ?2"
    ),
    find_tasks_like=(
        "SELECT DISTINCT message_id FROM queue_executions WHERE tenant_id = ?1"
        " AND message_id BETWEEN ?3 AND ?4 LIMIT ?2"
    ),
    find_event=(
        "SELECT DISTINCT task_id FROM event_log WHERE tenant_id = ?1 AND task_id = ?3 LIMIT ?2"
    ),
    find_events_like=(
        "SELECT DISTINCT task_id FROM event_log WHERE tenant_id = ?1"
        " AND task_id BETWEEN ?3 AND ?4 LIMIT ?2"
    ),
    find_related=(
        "SELECT tenant_id, message_id, CASE ?1 WHEN correlation_id THEN 'correlation id'"
        " WHEN trace_id THEN 'trace id' ELSE 'idempotency key' END FROM queue_executions"
        " WHERE (correlation_id = ?1 OR trace_id = ?1 OR idem_key = ?1)"
        f" AND {_OF_TENANT} ORDER BY rowid LIMIT ?3"
    ),
    events_of=f"{EVENT} WHERE tenant_id = ?1 AND task_id = ?2 ORDER BY rowid",
    effects_of=(
        "SELECT name, state, value, worker_id, created_at, done_at FROM effects"
        " WHERE tenant_id = ?1 AND message_id = ?2 ORDER BY created_at, name"
    ),
    replies_of=(
        "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, status,"
        " retry_count, created_at, last_attempt_at, last_error, in_doubt FROM deliveries"
        " WHERE tenant_id = ?1 AND task_id = ?2 ORDER BY created_at, id"
    ),
    queues=_QUEUES,
    unsent=(
        "SELECT queue_name, count(*) FILTER (WHERE due_at <= ?1),"
        " count(*) FILTER (WHERE due_at > ?1), min(created_at) FILTER (WHERE due_at <= ?1)"
        " FROM outbox GROUP BY queue_name"
    ),
    # The second condition on status is the one of a partial index.
    unended=(
        "SELECT queue_name, count(*) FILTER (WHERE status <> 'parked'),"
        " count(*) FILTER (WHERE status = 'parked'),"
        " min(started_at) FILTER (WHERE status <> 'parked' AND coalesce(due_at, 0) <= ?1)"
        " FROM queue_executions"
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
    paused_queues="SELECT subscription, max(paused_at) FROM sources GROUP BY subscription",
    task_counts="SELECT queue_name, status, count(*) FROM queue_executions GROUP BY 1, 2",
    reply_counts="SELECT channel, status, count(*) FROM deliveries GROUP BY 1, 2",
    workers=(
        "SELECT w.worker_id, w.name, w.started_at, 1, (SELECT count(*) FROM queue_executions q"
        " WHERE q.worker_id = w.worker_id AND q.status = 'running'), w.offers FROM workers w"
        " WHERE w.state = 'alive' ORDER BY w.worker_id"
    ),
    quota_use=(
        "SELECT q.tenant_id, q.name, q.window_start, q.window_us, q.runs, q.llm_calls, q.tokens,"
        " q.cost, (SELECT count(*) FROM queue_executions t WHERE t.status = 'ready'"
        f" AND t.tenant_id = q.tenant_id AND t.error_message = '{WAITS_FOR}' || q.name)"
        " FROM quotas q WHERE ?1 IS NULL OR q.tenant_id = ?1 ORDER BY q.tenant_id, q.name"
    ),
    final_events=(
        "SELECT e.tenant_id, e.task_id, e.event_type, e.data, (SELECT d.history"
        " FROM dead_letters d WHERE d.tenant_id = e.tenant_id AND d.message_id = e.task_id"
        " AND d.subscription = e.subscription ORDER BY d.failed_at DESC LIMIT 1)"
        " FROM json_each(?2) t CROSS JOIN event_log e WHERE e.tenant_id = t.value"
        " AND e.task_id = json_extract(?3, '$[' || t.key || ']') AND e.subscription = ?1"
        f" AND e.event_type IN ({_FINAL})"
    ),
)

# ── the queue and the ledger in the file ─────────────────────────────────────────────────────────

SENT = (
    "SELECT queue, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),"
    " min(sent_at) FILTER (WHERE state = 0) FROM messages GROUP BY queue"
)
SENT_WITH_TEXT = (
    "SELECT queue, message_id, state, priority, lane, sent_at, due_at, expires_at, headers,"
    " body, body_crc FROM messages WHERE message_id = ?1 OR instr(body, ?2) > 0"
    " ORDER BY message_id <> ?1, seq LIMIT ?3"
)
EVENTS_AFTER = f"{EVENT} WHERE rowid > ?1 ORDER BY rowid LIMIT ?2"
EVENT_COUNTS = (
    "SELECT subscription, event_type, count(*) FROM event_log WHERE rowid >= ?1"
    " AND created_at >= ?2 GROUP BY 1, 2"
)
LAST_POSITION = "SELECT max(rowid) FROM event_log"
NEXT_EVENT = "SELECT rowid, created_at FROM event_log WHERE rowid >= ?1 ORDER BY rowid LIMIT 1"
