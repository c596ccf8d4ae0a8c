"""The statements of PostgreSQL: the shared ones in its words, and those that it writes itself."""

from __future__ import annotations

from ackbone.pgserver.arrays import MICROSECOND, NOW, moment, us
from ackbone.store.conditions import ENDED, FINAL_EVENTS, UNCOMMON, UNENDED, none_of
from ackbone.store.delivery_rows import LIVE
from ackbone.store.ledger import TENANT
from ackbone.store.retention import BATCH
from ackbone.store.sql import Statements, rendered
from ackbone.store.sql.claims import ClaimsSql, RunsSql
from ackbone.store.sql.deliveries import DUE_REPLY, DeliveriesSql
from ackbone.store.sql.operations import ApprovalsSql, OperationsSql
from ackbone.store.sql.records import EVENT, RecordsSql
from ackbone.store.sql.store import GONE, OURS, RUNNING, MaintenanceSql, StoreSql, WorkersSql
from ackbone.store.workers import ALONE_AT, SUSPECT_AT

WORDS = (
    (r"\bat\((\$\d+)\)", moment(r"\1::bigint")),
    (r"\bus\(([\w.]+)\)", us(r"\1")),
    (r"\bplaced\(([\w.]+)\)", r"\1"),
    (r"\bdigits\((\w+)\)", r"replace(\1::text, '-', '')"),
)


_NEXT_LANE = (
    "SELECT {0}tenant_id, {0}subscription, {0}lane FROM queue_executions {1}"
    " WHERE {0}lane IS NOT NULL AND {2}{3} ORDER BY {0}tenant_id, {0}subscription, {0}lane LIMIT 1"
)

_CLAIMS = ClaimsSql(
    first_due=(
        f"SELECT p.priority, {us('d.due_at')} - coalesce($2::bigint, {us(NOW)})"
        " FROM (VALUES (3), (2), (1), (0)) p(priority) CROSS JOIN LATERAL ("
        "SELECT a.due_at FROM queue_executions a WHERE a.subscription = $1 AND a.status = 'ready'"
        " AND a.priority = p.priority ORDER BY a.due_at LIMIT 1) d"
    ),
    unresolved="SELECT 1 FROM queue_executions WHERE status = 'waiting_key' LIMIT 1",
    stuck=(
        # From lane to lane through the index, however many messages wait in each.
        "WITH RECURSIVE lanes (tenant_id, subscription, lane) AS ("
        f"({_NEXT_LANE.format('', '', UNENDED, '')}) UNION ALL SELECT n.* FROM lanes l"
        " CROSS JOIN LATERAL ("
        + _NEXT_LANE.format(
            "m.",
            "m",
            none_of(*ENDED, column="m.status"),
            " AND (m.tenant_id, m.subscription, m.lane) > (l.tenant_id, l.subscription, l.lane)",
        )
        + ") n) SELECT l.tenant_id, l.subscription, l.lane FROM lanes l CROSS JOIN LATERAL ("
        "SELECT f.status FROM queue_executions f WHERE f.tenant_id = l.tenant_id"
        " AND f.subscription = l.subscription AND f.lane = l.lane AND f.lane IS NOT NULL"
        f" AND {none_of(*ENDED, column='f.status')} ORDER BY f.lane_seq LIMIT 1) h"
        " WHERE h.status = 'queued'"
    ),
)

_MAINTENANCE = MaintenanceSql(
    outbox_due=(
        "SELECT id::text, tenant_id, queue_name, message_id, headers::text, body, body_crc,"
        " priority, ordering_key, ttl_us, clock_timestamp() FROM outbox"
        f" WHERE due_at <= {NOW} AND queue_name <> ALL($2::text[])"
        " ORDER BY due_at, id LIMIT $1::int"
    ),
    copies_due=(
        "SELECT tenant_id, message_id, clock_timestamp() FROM queue_executions"
        f" WHERE status = 'open' AND {UNCOMMON} AND subscription = $1"
        f" AND due_at <= {NOW} - $2::bigint * {MICROSECOND} ORDER BY due_at LIMIT $3::int"
    ),
    approvals_due=(
        "SELECT clock_timestamp() FROM approvals WHERE state = 'pending'"
        f" AND expires_at <= {NOW} LIMIT 1"
    ),
    delete_expired_keys=(
        "DELETE FROM idempotency_keys k USING (SELECT tenant_id, subscription, key"
        " FROM idempotency_keys WHERE tenant_id = $2 AND expires_at <= at($1) AND state = 'done'"
        f" ORDER BY expires_at LIMIT {BATCH} FOR UPDATE SKIP LOCKED) o"
        " WHERE k.tenant_id = o.tenant_id"
        " AND k.subscription = o.subscription AND k.key = o.key RETURNING 1"
    ),
    seals=(
        f"SELECT data::text FROM event_log WHERE tenant_id = '{TENANT}' AND task_id = $1"
        " ORDER BY created_at DESC, seq DESC LIMIT $2::int"
    ),
)

_STORE = StoreSql(
    suspects_due=(
        f"SELECT subscription, event_name, count(*) FILTER (WHERE crashes < {ALONE_AT}),"
        f" count(*) FILTER (WHERE crashes >= {ALONE_AT}), {NOW} FROM (SELECT subscription,"
        " event_name, crashes FROM queue_executions"
        f" WHERE status = 'ready' AND crashes >= {SUSPECT_AT} AND {OURS}"
        f" AND priority IN (0, 1, 2, 3) AND due_at <= {NOW} LIMIT 1000) s GROUP BY 1, 2"
    ),
    next_due=(
        f"SELECT min({us('d.due_at')}) - coalesce($2::bigint, {us(NOW)})"
        " FROM (VALUES (3), (2), (1), (0)) p(priority) CROSS JOIN LATERAL ("
        "SELECT a.due_at FROM queue_executions a WHERE a.subscription = $1 AND a.status = 'ready'"
        f" AND a.priority = p.priority AND a.due_at > {NOW} ORDER BY a.due_at LIMIT 1) d"
    ),
    identity="SELECT state #>> '{}' FROM roles WHERE role = '_store'",
    set_identity=(
        "INSERT INTO roles (role, state) VALUES ('_store', to_json($1::text))"
        " ON CONFLICT (role) DO NOTHING"
    ),
    ended_tasks=(
        "SELECT t.tenant_id, t.subscription, t.message_id, t.event_name, t.result, t.retry_count,"
        " t.error_message, t.idem_key, w.name FROM json_array_elements($1::json) u(task)"
        " JOIN queue_executions t ON t.tenant_id = u.task ->> 0 AND t.subscription = u.task ->> 1"
        " AND t.message_id = u.task ->> 2 LEFT JOIN workers w ON w.worker_id = t.worker_id"
    ),
)

# The order in which batches lock rows.
_LOCKED = "ORDER BY q.tenant_id, q.subscription, q.message_id LIMIT 1000 FOR UPDATE OF q"

# From queue to queue through an index, without reading the tasks.
_QUEUES = (
    "WITH RECURSIVE q (tenant, queue) AS ((SELECT tenant_id, queue_name FROM queue_executions"
    " ORDER BY tenant_id, queue_name LIMIT 1) UNION ALL SELECT n.tenant_id, n.queue_name FROM q"
    " CROSS JOIN LATERAL (SELECT t.tenant_id, t.queue_name FROM queue_executions t"
    " WHERE (t.tenant_id, t.queue_name) > (q.tenant, q.queue)"
    " ORDER BY t.tenant_id, t.queue_name LIMIT 1) n) SELECT tenant, queue FROM q"
)

_RECORDS = RecordsSql(
    events_of=f"{EVENT} WHERE tenant_id = $1 AND task_id = $2 ORDER BY created_at, id",
    queues=_QUEUES,
    workers=(
        "SELECT w.worker_id, w.name, us(w.started_at), w.lease_until >= clock_timestamp(),"
        " (SELECT count(*) FROM queue_executions q WHERE q.worker_id = w.worker_id"
        " AND q.status = 'running'), w.offers FROM workers w WHERE w.state = 'alive'"
        " ORDER BY w.worker_id"
    ),
    final_events=(
        "SELECT e.tenant_id, e.task_id, e.event_type, e.data::text, (SELECT d.history::text"
        " FROM dead_letters d WHERE d.tenant_id = e.tenant_id AND d.message_id = e.task_id"
        " AND d.subscription = e.subscription ORDER BY d.failed_at DESC LIMIT 1)"
        " FROM unnest($2::text[], $3::text[]) u(tenant, task) JOIN event_log e"
        " ON e.tenant_id = u.tenant AND e.task_id = u.task WHERE e.subscription = $1"
        f" AND e.event_type IN {FINAL_EVENTS}"
    ),
)

_LEVEL = (
    "SELECT d.priority, d.due_at FROM deliveries d WHERE d.channel = c.channel"
    " AND d.status = 'pending' {} ORDER BY d.priority DESC, d.due_at LIMIT 1"
)

_DELIVERIES = DeliveriesSql(
    # From one priority to the next through the index.
    levels=(
        "SELECT c.channel, l.priority, us(l.due_at),"
        f" coalesce($3::bigint, {us(NOW)})"
        " FROM unnest($1::text[]) c(channel) CROSS JOIN LATERAL (WITH RECURSIVE l AS"
        f" (({_LEVEL.format('')}) UNION ALL SELECT n.priority, n.due_at FROM l CROSS JOIN LATERAL"
        f" ({_LEVEL.format('AND d.priority < l.priority')}) n) SELECT priority, due_at FROM l) l"
        " WHERE NOT EXISTS (SELECT 1 FROM roles r WHERE r.role = $2 || c.channel)"
    ),
    behind=(
        f"SELECT {DUE_REPLY.format(calls='d.calls')}, false, d.content FROM deliveries h"
        f" JOIN deliveries d ON d.lane = h.lane AND d.seq > h.seq AND d.{LIVE} WHERE h.id = $1"
        " AND h.status = 'sending' AND h.worker_id = $2::bigint AND h.calls = $3::int"
        " ORDER BY d.seq LIMIT $4::int"
    ),
    promote=(
        "UPDATE deliveries d SET status = 'pending', due_at = at($2)"
        " FROM unnest($1::text[]) u(lane) CROSS JOIN LATERAL (SELECT q.id FROM deliveries q"
        f" WHERE q.lane = u.lane AND q.{LIVE} AND q.status = 'queued' ORDER BY q.seq LIMIT 1) f"
        " WHERE d.id = f.id RETURNING 1"
    ),
    free=(
        "UPDATE deliveries d SET due_at = at($2), put_off_by = NULL"
        " FROM (SELECT id FROM deliveries WHERE put_off_by = $1 AND status = 'pending'"
        " ORDER BY priority DESC, seq LIMIT $3::int) f WHERE d.id = f.id RETURNING 1"
    ),
)

SQL = Statements(
    operations=rendered(OperationsSql(), WORDS),
    approvals=rendered(ApprovalsSql(), WORDS),
    claims=rendered(_CLAIMS, WORDS),
    maintenance=rendered(_MAINTENANCE, WORDS),
    runs=rendered(RunsSql(), WORDS),
    store=rendered(_STORE, WORDS),
    workers=rendered(
        WorkersSql(
            offers=(
                "SELECT offers FROM workers WHERE offers IS NOT NULL AND (state IN"
                " ('alive', 'leaving') OR ended_at BETWEEN clock_timestamp() - $1::bigint"
                f" * {MICROSECOND} AND coalesce(at($2), clock_timestamp()))"
            ),
            running=f"{RUNNING} AND {GONE} AND q.worker_id = $1::bigint {_LOCKED}",
            running_of_the_gone=f"{RUNNING} AND {GONE} {_LOCKED}",
        ),
        WORDS,
    ),
    records=rendered(_RECORDS, WORDS),
    deliveries=rendered(_DELIVERIES, WORDS),
)
