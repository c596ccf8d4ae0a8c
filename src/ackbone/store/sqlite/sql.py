"""The statements of SQLite: the shared ones in its words, and those that it writes itself.

`id_of` makes the 16 bytes of an id's text. A list is a JSON array.
"""

from __future__ import annotations

from ackbone.store import conditions
from ackbone.store.claims import PRIORITIES
from ackbone.store.conditions import FINAL_EVENTS, UNCOMMON, UNENDED
from ackbone.store.delivery_rows import LIVE
from ackbone.store.ledger import TENANT
from ackbone.store.retention import BATCH
from ackbone.store.sql import Statements, rendered, worded
from ackbone.store.sql.claims import ClaimsSql, RunsSql
from ackbone.store.sql.deliveries import DUE_REPLY, OF_TENANT, RECORD, DeliveriesSql
from ackbone.store.sql.operations import ApprovalsSql, OperationsSql
from ackbone.store.sql.records import EVENT, LETTER_FILTER, PARKED, TENANT_NAMES, RecordsSql
from ackbone.store.sql.store import (
    GONE,
    OURS,
    RUNNING,
    MaintenanceSql,
    StoreSql,
    WorkersSql,
)
from ackbone.store.workers import ALONE_AT, SUSPECT_AT

WORDS = (
    (r"\bat\((\$\d+)\)", r"\1"),
    (r"\bus\(([\w.]+)\)", r"\1"),
    (r"\bplaced\((\w+\.)?\w+\)", r"\1rowid"),
    (r"\buuid_send\(([\w.]+)\)", r"\1"),
    (r"\bdigits\((\w+)\)", r"lower(hex(\1))"),
    (r"= ANY\((\$\d+)::text\[\]\)", r"IN (SELECT value FROM json_each(\1))"),
    (r"= ANY\((\$\d+)::uuid\[\]\)", r"IN (SELECT id_of(value) FROM json_each(\1))"),
    (r"\bunnest\((\$\d+)::text\[\]\) AS value", r"json_each(\1)"),
    (r"\bstarts_with\(([\w.]+), ([^()]+)\)", r"substr(\1, 1, length(\2)) = \2"),
    (r"\bstrpos\(", "instr("),
    (r"(\$\d+)::uuid IS NULL", r"\1 IS NULL"),
    (r"(\$\d+)::uuid", r"id_of(\1)"),
    (r"::\w+", ""),
    (r' COLLATE "C"| FOR (UPDATE|SHARE)( SKIP LOCKED)?', ""),
    (r"\$(\d+)", r"?\1"),
)


TASK = worded(conditions.TASK, WORDS)

_CLAIMS = ClaimsSql(
    first_due=" UNION ALL ".join(
        f"SELECT {p}, min(due_at) - ?2 FROM queue_executions WHERE subscription = ?1"
        f" AND status = 'ready' AND priority = {p}"
        for p in PRIORITIES
    ),
    unresolved=(
        "SELECT 1 FROM queue_executions w LEFT JOIN idempotency_keys k"
        " ON k.tenant_id = w.tenant_id AND k.subscription = w.subscription AND k.key = w.idem_key"
        " WHERE w.status = 'waiting_key' AND (k.state IS NULL OR k.state = 'done') LIMIT 1"
    ),
    stuck=(
        "SELECT tenant_id, subscription, lane FROM (SELECT tenant_id, subscription, lane, status,"
        f" min(lane_seq) FROM queue_executions WHERE {UNENDED}"
        " AND lane IS NOT NULL GROUP BY tenant_id, subscription, lane) WHERE status = 'queued'"
    ),
)

_MAINTENANCE = MaintenanceSql(
    outbox_due=(
        "SELECT hex(id), tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
        " ordering_key, ttl_us FROM outbox WHERE due_at <= ?3"
        " AND queue_name NOT IN (SELECT value FROM json_each(?2)) ORDER BY due_at, id LIMIT ?1"
    ),
    copies_due=(
        "SELECT tenant_id, message_id FROM queue_executions WHERE status = 'open'"
        f" AND {UNCOMMON} AND subscription = ?1 AND due_at <= ?4 - ?2 ORDER BY due_at LIMIT ?3"
    ),
    approvals_due="SELECT 1 FROM approvals WHERE state = 'pending' AND expires_at <= ?1 LIMIT 1",
    delete_expired_keys=(
        "DELETE FROM idempotency_keys WHERE rowid IN (SELECT rowid FROM idempotency_keys"
        f" WHERE tenant_id = ?2 AND expires_at <= ?1 AND state = 'done' LIMIT {BATCH}) RETURNING 1"
    ),
    seals=(
        f"SELECT data FROM event_log WHERE tenant_id = '{TENANT}' AND task_id = ?1"
        " ORDER BY rowid DESC LIMIT ?2"
    ),
)

_STORE = StoreSql(
    suspects_due=(
        f"SELECT subscription, event_name, sum(crashes < {ALONE_AT}), sum(crashes >= {ALONE_AT})"
        " FROM (SELECT subscription, event_name, crashes FROM queue_executions"
        f" WHERE status = 'ready' AND crashes >= {SUSPECT_AT} AND due_at <= ?2"
        f" AND {OURS} LIMIT 1000) GROUP BY 1, 2"
    ),
    next_due="SELECT min(due_at) - ?2 FROM ("
    + " UNION ALL ".join(
        "SELECT min(due_at) AS due_at FROM queue_executions WHERE subscription = ?1"
        f" AND status = 'ready' AND priority = {p} AND due_at > ?2"
        for p in PRIORITIES
    )
    + ")",
    identity="SELECT state FROM roles WHERE role = '_store'",
    set_identity="INSERT OR IGNORE INTO roles (role, state) VALUES ('_store', ?1)",
    ended_tasks=(
        "SELECT t.tenant_id, t.subscription, t.message_id, t.event_name, t.result, t.retry_count,"
        " t.error_message, t.idem_key, w.name FROM json_each(?1) u JOIN queue_executions t"
        " ON t.tenant_id = json_extract(u.value, '$[0]')"
        " AND t.subscription = json_extract(u.value, '$[1]')"
        " AND t.message_id = json_extract(u.value, '$[2]')"
        " LEFT JOIN workers w ON w.worker_id = t.worker_id"
    ),
)

# One step through an index for each queue of a tenant. SQLite would read all tasks of a queue to
# compare two columns at once with those of the row before.
_QUEUES = TENANT_NAMES.format("queue_executions") + (
    ", q (tenant, queue) AS (SELECT name, (SELECT min(queue_name) FROM queue_executions"
    " WHERE tenant_id = t.name) FROM t WHERE name IS NOT NULL UNION ALL SELECT q.tenant,"
    " (SELECT min(queue_name) FROM queue_executions WHERE tenant_id = q.tenant"
    " AND queue_name > q.queue) FROM q WHERE q.queue IS NOT NULL)"
    " SELECT tenant, queue FROM q WHERE queue IS NOT NULL"
)

_RECORDS = RecordsSql(
    letter_ids=(
        f"SELECT id FROM dead_letters WHERE {LETTER_FILTER} ORDER BY id LIMIT ifnull(?1, -1)"
    ),
    # The sign before rowid keeps SQLite from reading the whole table backwards, to save the sorting
    # of a few rows.
    parked=f"{PARKED} AND (?4 IS NULL OR rowid < ?4) ORDER BY +rowid DESC LIMIT ?5",
    events_of=f"{EVENT} WHERE tenant_id = ?1 AND task_id = ?2 ORDER BY rowid",
    event_counts=(
        "SELECT subscription, event_type, count(*) FROM event_log WHERE created_at >= ?1"
        " AND rowid >= ?2 GROUP BY 1, 2"
    ),
    queues=_QUEUES,
    workers=(
        "SELECT w.worker_id, w.name, w.started_at, 1, (SELECT count(*) FROM queue_executions q"
        " WHERE q.worker_id = w.worker_id AND q.status = 'running'), w.offers FROM workers w"
        " WHERE w.state = 'alive' ORDER BY w.worker_id"
    ),
    final_events=(
        "SELECT e.tenant_id, e.task_id, e.event_type, e.data, (SELECT d.history"
        " FROM dead_letters d WHERE d.tenant_id = e.tenant_id AND d.message_id = e.task_id"
        " AND d.subscription = e.subscription ORDER BY d.failed_at DESC LIMIT 1)"
        " FROM json_each(?2) t CROSS JOIN event_log e WHERE e.tenant_id = t.value"
        " AND e.task_id = json_extract(?3, '$[' || t.key || ']') AND e.subscription = ?1"
        f" AND e.event_type IN {FINAL_EVENTS}"
    ),
)

_HIGHEST = "SELECT max(d.priority) FROM deliveries d WHERE d.status = 'pending' AND d.channel ="

_DELIVERIES = DeliveriesSql(
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
    behind=(
        f"SELECT {DUE_REPLY.format(calls='d.calls')}, 0, d.content"
        " FROM deliveries h CROSS JOIN deliveries d"
        " WHERE h.id = ?1 AND h.status = 'sending' AND h.worker_id = ?2 AND h.calls = ?3"
        f" AND d.lane = h.lane AND d.{LIVE} AND d.rowid > h.rowid ORDER BY d.rowid LIMIT ?4"
    ),
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
    # The first condition finds the place in the index.
    beginning=f"{RECORD} WHERE id >= $1 AND starts_with(id, $1) AND {OF_TENANT}",
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
                "SELECT offers FROM workers WHERE offers IS NOT NULL"
                " AND (state IN ('alive', 'leaving') OR ended_at BETWEEN ?2 - ?1 AND ?2)"
            ),
            running=f"{RUNNING} AND q.worker_id = ?1",
            running_of_the_gone=f"{RUNNING} AND {GONE}",
        ),
        WORDS,
    ),
    records=rendered(_RECORDS, WORDS),
    deliveries=rendered(_DELIVERIES, WORDS),
)
