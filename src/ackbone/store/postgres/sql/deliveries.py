"""Statements of `ackbone.store.deliveries` and `delivery_operations`."""

from ackbone.store.delivery_operations import AGREES, CHANGED_IN, RETRIED_FROM
from ackbone.store.delivery_rows import DELIVERY_COLUMNS, LIVE
from ackbone.store.postgres.arrays import moment, us
from ackbone.store.statements import DeliveriesSql

_DUE_REPLY = (
    "d.retry_count, d.max_retries, d.in_doubt, d.subscription, d.lane, d.priority,"
    f" {us('d.expires_at')}, {us('d.created_at')}"
)
_REPLY = "d.id, d.tenant_id, d.channel, d.recipient, d.conversation, d.task_id, d.options::text"
_LEVEL = (
    "SELECT d.priority, d.due_at FROM deliveries d WHERE d.channel = c.channel"
    " AND d.status = 'pending' {} ORDER BY d.priority DESC, d.due_at LIMIT 1"
)
_ACTED = "RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), channel, lane"
_RECORD = (
    "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, conversation,"
    " priority, status, retry_count, max_retries, calls, resent, in_doubt, receipts::text,"
    f" options::text, {us('due_at')}, {us('created_at')}, {us('expires_at')},"
    f" {us('last_attempt_at')}, last_error FROM deliveries"
)
_FILTER = (
    " WHERE ($1::text IS NULL OR status = $1) AND ($2::text IS NULL OR channel = $2)"
    " AND ($3::text IS NULL OR tenant_id = $3)"
    f" AND ($4::bigint IS NULL OR created_at >= {moment('$4::bigint')})"
)
_OF_TENANT = "($2::text IS NULL OR tenant_id = $2) ORDER BY id LIMIT $3::bigint"

INSERT = (
    f"INSERT INTO deliveries ({DELIVERY_COLUMNS}) SELECT u.id, u.tenant, u.sub, u.task, u.channel,"
    " u.recipient, u.content, u.conversation, u.priority,"
    f" {moment('u.due')}, {moment('u.created')}, u.lane, u.options, u.retries,"
    f" {moment('u.expires')} FROM unnest($1::text[], $2::text[], $3::text[], $4::text[],"
    " $5::text[], $6::text[], $7::text[], $8::text[], $9::int[], $10::bigint[], $11::bigint[],"
    " $12::text[], $13::json[], $14::int[], $15::bigint[]) u(id, tenant, sub, task,"
    " channel, recipient, content, conversation, priority, due, created, lane, options, retries,"
    " expires) ON CONFLICT (id) DO NOTHING"
)
PUT_OFF = (
    f"UPDATE deliveries d SET due_at = {moment('u.until')}, put_off_by = u.by"
    " FROM unnest($1::text[], $2::bigint[], $3::text[]) u(id, until, by) WHERE d.id = u.id"
)
END = (
    "UPDATE deliveries d SET status = u.status, last_error = u.error,"
    f" due_at = coalesce({moment('u.due')}, d.due_at),"
    " retry_count = coalesce(d.retry_count + u.retries, 0),"
    " in_doubt = coalesce(u.in_doubt, d.in_doubt), receipts = CASE WHEN u.receipt IS NULL"
    " THEN d.receipts ELSE (coalesce(d.receipts::jsonb, '[]') || to_jsonb(u.receipt))::json END,"
    " resent = d.resent + u.resent"
    " FROM unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::bigint[], $6::int[],"
    " $7::int[], $8::text[], $9::int[]) u(id, call, status, error, due, retries, in_doubt, receipt,"
    " resent) WHERE d.id = u.id AND d.status = 'sending' AND d.worker_id = $10::bigint"
    " AND d.calls = u.call RETURNING d.id, d.calls, d.tenant_id, coalesce(d.subscription, ''),"
    " coalesce(d.task_id, ''), d.lane, d.retry_count, coalesce(json_array_length(d.receipts), 0)"
)
SAVE_WINDOWS = (
    f"INSERT INTO send_windows (key, state, ends_at) SELECT u.key, u.state, {moment('u.ends')}"
    " FROM unnest($1::text[], $2::json[], $3::bigint[]) u(key, state, ends) ON CONFLICT (key)"
    " DO UPDATE SET state = excluded.state, ends_at = excluded.ends_at"
)
HELD = (
    f"SELECT {_REPLY}, d.calls - 1, {_DUE_REPLY}, true, d.content, d.receipts::text"
    " FROM unnest($1::text[], $2::int[]) u(id, call) JOIN deliveries d ON d.id = u.id"
    " WHERE d.status = 'sending' AND d.worker_id = $3::bigint AND d.calls = u.call"
)
"""ids, calls, worker → the calls that are this worker's: their grant was committed."""

DELIVERIES = DeliveriesSql(
    # From one priority to the next through the index.
    levels=(
        f"SELECT c.channel, l.priority, {us('l.due_at')},"
        f" coalesce($3::bigint, {us('(SELECT clock_timestamp())')})"
        " FROM unnest($1::text[]) c(channel) CROSS JOIN LATERAL (WITH RECURSIVE l AS"
        f" (({_LEVEL.format('')}) UNION ALL SELECT n.priority, n.due_at FROM l CROSS JOIN LATERAL"
        f" ({_LEVEL.format('AND d.priority < l.priority')}) n) SELECT priority, due_at FROM l) l"
        " WHERE NOT EXISTS (SELECT 1 FROM roles r WHERE r.role = $2 || c.channel)"
    ),
    due=(
        f"SELECT {_REPLY}, d.calls, {_DUE_REPLY},"
        f" NOT EXISTS (SELECT 1 FROM deliveries e WHERE e.lane = d.lane AND e.{LIVE}"
        " AND e.seq < d.seq) AND NOT EXISTS (SELECT 1 FROM deliveries s WHERE s.lane = d.lane"
        " AND s.status = 'sending') FROM deliveries d WHERE d.channel = $1"
        f" AND d.status = 'pending' AND d.priority = $2::int AND d.due_at <= {moment('$3::bigint')}"
        " ORDER BY d.due_at, d.seq LIMIT $4::int"
    ),
    behind=(
        f"SELECT {_REPLY}, d.calls, {_DUE_REPLY}, false, d.content FROM deliveries h"
        f" JOIN deliveries d ON d.lane = h.lane AND d.seq > h.seq AND d.{LIVE} WHERE h.id = $1"
        " AND h.status = 'sending' AND h.worker_id = $2::bigint AND h.calls = $3::int"
        " ORDER BY d.seq LIMIT $4::int"
    ),
    grant=(
        "UPDATE deliveries SET status = 'sending', worker_id = $2::bigint,"
        f" last_attempt_at = {moment('$3::bigint')}, calls = calls + 1, put_off_by = NULL"
        " WHERE id = ANY($1::text[]) RETURNING id, content, receipts::text"
    ),
    queue="UPDATE deliveries SET status = 'queued' WHERE id = ANY($1::text[])",
    expire="UPDATE deliveries SET status = 'failed', last_error = $2 WHERE id = ANY($1::text[])",
    promote=(
        f"UPDATE deliveries d SET status = 'pending', due_at = {moment('$2::bigint')}"
        " FROM unnest($1::text[]) u(lane) CROSS JOIN LATERAL (SELECT q.id FROM deliveries q"
        f" WHERE q.lane = u.lane AND q.{LIVE} AND q.status = 'queued' ORDER BY q.seq LIMIT 1) f"
        " WHERE d.id = f.id RETURNING 1"
    ),
    free=(
        f"UPDATE deliveries d SET due_at = {moment('$2::bigint')}, put_off_by = NULL"
        " FROM (SELECT id FROM deliveries WHERE put_off_by = $1 AND status = 'pending'"
        " ORDER BY priority DESC, seq LIMIT $3::int) f WHERE d.id = f.id RETURNING 1"
    ),
    orphans=(
        f"SELECT id, calls, coalesce({us('last_attempt_at')}, 0), in_doubt, channel, tenant_id,"
        " coalesce(subscription, ''), coalesce(task_id, '') FROM deliveries"
        " WHERE status = 'sending' AND (worker_id IS NULL OR (worker_id <> $1::bigint AND worker_id"
        " NOT IN (SELECT worker_id FROM workers WHERE state IN ('alive', 'leaving'))))"
        " LIMIT $2::bigint"
    ),
    take_back=(
        f"UPDATE deliveries SET status = 'pending', due_at = {moment('$2::bigint')},"
        " resent = resent + (in_doubt > 0)::int, in_doubt = 1, last_error = $3"
        " WHERE id = ANY($1::text[])"
    ),
    windows="SELECT key, state::text FROM send_windows WHERE key = ANY($1::text[])",
    counting_windows=(
        f"SELECT key, state::text FROM send_windows WHERE ends_at > {moment('$1::bigint')}"
    ),
    pause="INSERT INTO roles (role) VALUES ($1) ON CONFLICT (role) DO NOTHING RETURNING 1",
    unpause="DELETE FROM roles WHERE role = $1 RETURNING 1",
    paused="SELECT role FROM roles WHERE starts_with(role, $1)",
    retry=(
        f"UPDATE deliveries SET status = 'pending', due_at = {moment('$2::bigint')},"
        f" retry_count = 0, last_attempt_at = NULL, expires_at = NULL, {AGREES} WHERE id = $1"
        f" AND {RETRIED_FROM} {_ACTED}"
    ),
    edit=(
        "UPDATE deliveries SET content = $2 WHERE id = $1 AND receipts IS NULL"
        f" AND {CHANGED_IN} {_ACTED}"
    ),
    discard=(
        f"UPDATE deliveries SET status = 'discarded', due_at = {moment('$2::bigint')}"
        f" WHERE id = $1 AND {CHANGED_IN} {_ACTED}"
    ),
    state="SELECT status, receipts IS NOT NULL FROM deliveries WHERE id = $1",
    records=f"{_RECORD}{_FILTER} ORDER BY seq DESC LIMIT $5::bigint",
    ids=f"SELECT id FROM deliveries{_FILTER} ORDER BY seq LIMIT $5::bigint",
    named=f"{_RECORD} WHERE id = $1 AND {_OF_TENANT}",
    beginning=f"{_RECORD} WHERE starts_with(id, $1) AND {_OF_TENANT}",
)
