"""Statements of `ackbone.store.deliveries` and `delivery_operations`."""

from ackbone.store.delivery_operations import AGREES, CHANGED_IN, RETRIED_FROM
from ackbone.store.delivery_rows import DELIVERY_COLUMNS, LIVE
from ackbone.store.statements import DeliveriesSql

_DUE_REPLY = (
    "d.id, d.tenant_id, d.channel, d.recipient, d.conversation, d.task_id, d.options, d.calls,"
    " d.retry_count, d.max_retries, d.in_doubt, d.subscription, d.lane, d.priority, d.expires_at,"
    " d.created_at"
)
_HIGHEST = "SELECT max(d.priority) FROM deliveries d WHERE d.status = 'pending' AND d.channel ="
_IDS = "id IN (SELECT value FROM json_each(?1))"
_ACTED = "RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), channel, lane"
_RECORD = (
    "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, conversation,"
    " priority, status, retry_count, max_retries, calls, resent, in_doubt, receipts, options,"
    " due_at, created_at, expires_at, last_attempt_at, last_error FROM deliveries"
)
_FILTER = (
    " WHERE (?1 IS NULL OR status = ?1) AND (?2 IS NULL OR channel = ?2)"
    " AND (?3 IS NULL OR tenant_id = ?3) AND (?4 IS NULL OR created_at >= ?4)"
)
_OF_TENANT = "(?2 IS NULL OR tenant_id = ?2) ORDER BY id LIMIT ?3"

INSERT = f"INSERT OR IGNORE INTO deliveries ({DELIVERY_COLUMNS})"
PUT_OFF = "UPDATE deliveries SET due_at = ?, put_off_by = ? WHERE id = ?"
END = (
    "UPDATE deliveries SET status = ?1, last_error = ?2, due_at = coalesce(?3, due_at),"
    " retry_count = coalesce(retry_count + ?4, 0), in_doubt = coalesce(?5, in_doubt),"
    " receipts = CASE WHEN ?6 IS NULL THEN receipts"
    " ELSE json_insert(coalesce(receipts, '[]'), '$[#]', ?6) END,"
    " resent = resent + ?7"
    " WHERE id = ?8 AND status = 'sending' AND worker_id = ?9 AND calls = ?10"
    " RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), lane, retry_count,"
    " coalesce(json_array_length(receipts), 0)"
)
SAVE_WINDOWS = "INSERT INTO send_windows (key, state, ends_at)"
SAVED_BEFORE = "ON CONFLICT (key) DO UPDATE SET state = excluded.state, ends_at = excluded.ends_at"

DELIVERIES = DeliveriesSql(
    levels=(
        "WITH RECURSIVE level(channel, priority) AS (SELECT c.value,"
        f" ({_HIGHEST} c.value) FROM json_each(?1) c WHERE NOT EXISTS"
        " (SELECT 1 FROM roles r WHERE r.role = ?2 || c.value)"
        f" UNION ALL SELECT l.channel, ({_HIGHEST} l.channel AND d.priority < l.priority)"
        " FROM level l WHERE l.priority IS NOT NULL)"
        " SELECT l.channel, l.priority, (SELECT min(d.due_at) FROM deliveries d"
        " WHERE d.status = 'pending' AND d.channel = l.channel AND d.priority = l.priority), ?3"
        " FROM level l WHERE l.priority IS NOT NULL"
    ),
    due=(
        f"SELECT {_DUE_REPLY},"
        f" NOT EXISTS (SELECT 1 FROM deliveries e WHERE e.lane = d.lane AND e.{LIVE}"
        " AND e.rowid < d.rowid) AND NOT EXISTS (SELECT 1 FROM deliveries s WHERE s.lane = d.lane"
        " AND s.status = 'sending') FROM deliveries d WHERE d.channel = ?1"
        " AND d.status = 'pending' AND d.priority = ?2 AND d.due_at <= ?3"
        " ORDER BY d.due_at, d.rowid LIMIT ?4"
    ),
    behind=(
        f"SELECT {_DUE_REPLY}, 0, d.content FROM deliveries h CROSS JOIN deliveries d"
        " WHERE h.id = ?1 AND h.status = 'sending' AND h.worker_id = ?2 AND h.calls = ?3"
        f" AND d.lane = h.lane AND d.{LIVE} AND d.rowid > h.rowid ORDER BY d.rowid LIMIT ?4"
    ),
    grant=(
        "UPDATE deliveries SET status = 'sending', worker_id = ?2, last_attempt_at = ?3,"
        f" calls = calls + 1, put_off_by = NULL WHERE {_IDS} RETURNING id, content, receipts"
    ),
    queue=f"UPDATE deliveries SET status = 'queued' WHERE {_IDS}",
    expire=f"UPDATE deliveries SET status = 'failed', last_error = ?2 WHERE {_IDS}",
    promote=(
        "UPDATE deliveries SET status = 'pending', due_at = ?2 WHERE rowid IN (SELECT (SELECT"
        f" d.rowid FROM deliveries d WHERE d.lane = u.value AND d.{LIVE} AND d.status = 'queued'"
        " ORDER BY d.rowid LIMIT 1) FROM json_each(?1) u) RETURNING 1"
    ),
    free=(
        "UPDATE deliveries SET due_at = ?2, put_off_by = NULL WHERE rowid IN (SELECT rowid FROM"
        " deliveries WHERE put_off_by = ?1 AND status = 'pending' ORDER BY priority DESC, rowid"
        " LIMIT ?3) RETURNING 1"
    ),
    orphans=(
        "SELECT id, calls, coalesce(last_attempt_at, 0), in_doubt, channel, tenant_id,"
        " coalesce(subscription, ''), coalesce(task_id, '') FROM deliveries"
        " WHERE status = 'sending' AND (worker_id IS NULL OR (worker_id <> ?1 AND worker_id NOT IN"
        " (SELECT worker_id FROM workers WHERE state IN ('alive', 'leaving')))) LIMIT ?2"
    ),
    take_back=(
        "UPDATE deliveries SET status = 'pending', due_at = ?2, resent = resent + (in_doubt > 0),"
        f" in_doubt = 1, last_error = ?3 WHERE {_IDS}"
    ),
    windows=("SELECT key, state FROM send_windows WHERE key IN (SELECT value FROM json_each(?1))"),
    counting_windows="SELECT key, state FROM send_windows WHERE ends_at > ?1",
    pause="INSERT OR IGNORE INTO roles (role) VALUES (?1) RETURNING 1",
    unpause="DELETE FROM roles WHERE role = ?1 RETURNING 1",
    paused="SELECT role FROM roles WHERE role GLOB ?1 || '*'",
    retry=(
        "UPDATE deliveries SET status = 'pending', due_at = ?2, retry_count = 0,"
        f" last_attempt_at = NULL, expires_at = NULL, {AGREES} WHERE id = ?1 AND {RETRIED_FROM}"
        f" {_ACTED}"
    ),
    edit=(
        "UPDATE deliveries SET content = ?2 WHERE id = ?1 AND receipts IS NULL"
        f" AND {CHANGED_IN} {_ACTED}"
    ),
    discard=(
        "UPDATE deliveries SET status = 'discarded', due_at = ?2"
        f" WHERE id = ?1 AND {CHANGED_IN} {_ACTED}"
    ),
    state="SELECT status, receipts IS NOT NULL FROM deliveries WHERE id = ?1",
    records=f"{_RECORD}{_FILTER} ORDER BY rowid DESC LIMIT ?5",
    ids=f"SELECT id FROM deliveries{_FILTER} ORDER BY rowid LIMIT ?5",
    named=f"{_RECORD} WHERE id = ?1 AND {_OF_TENANT}",
    beginning=f"{_RECORD} WHERE id >= ?1 AND substr(id, 1, length(?1)) = ?1 AND {_OF_TENANT}",
)
