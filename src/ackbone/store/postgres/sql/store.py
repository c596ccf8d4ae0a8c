"""Statements of `ackbone.store.base` and `notices`."""

from ackbone.store.conditions import UNCOMMON
from ackbone.store.crash import ALONE_AT, SUSPECT_AT
from ackbone.store.statements import StoreSql

_NOW = "(SELECT clock_timestamp())"
_OURS = "subscription = ANY($1::text[])"
_SENT_OR_RUNNING = (
    "EXISTS (SELECT 1 FROM outbox WHERE queue_name = ANY($1::text[]))"
    f" OR EXISTS (SELECT 1 FROM queue_executions WHERE status = 'running' AND {_OURS})"
)
_AMONG = f"FROM queue_executions WHERE status IN ({{}}) AND {UNCOMMON} AND {_OURS}"
_WAITING = _AMONG.format("'ready', 'queued', 'waiting_key', 'open'")
_READY = _AMONG.format("'ready'")
_BEHIND = _AMONG.format("'queued', 'waiting_key', 'open'")

STORE = StoreSql(
    to_cancel=(
        "SELECT tenant_id, subscription, message_id FROM queue_executions"
        " WHERE worker_id = $1::bigint AND status = 'running' AND cancel_at IS NOT NULL"
    ),
    suspects_due=(
        f"SELECT subscription, event_name, count(*) FILTER (WHERE crashes < {ALONE_AT}),"
        f" count(*) FILTER (WHERE crashes >= {ALONE_AT}), {_NOW} FROM (SELECT subscription,"
        " event_name, crashes FROM queue_executions"
        f" WHERE status = 'ready' AND crashes >= {SUSPECT_AT} AND {_OURS}"
        f" AND priority IN (0, 1, 2, 3) AND due_at <= {_NOW} LIMIT 1000) s GROUP BY 1, 2"
    ),
    paused="SELECT subscription FROM sources WHERE paused_at IS NOT NULL",
    busy=f"SELECT {_SENT_OR_RUNNING} OR EXISTS (SELECT 1 {_WAITING})",
    stuck=(
        f"SELECT CASE WHEN {_SENT_OR_RUNNING} OR EXISTS (SELECT 1 {_READY}) THEN 0"
        f" ELSE (SELECT count(*) {_BEHIND}) END"
    ),
    holds_role="SELECT 1 FROM roles WHERE role = $1 AND worker_id = $2::bigint",
    take_role=(
        "INSERT INTO roles (role, worker_id) VALUES ($1, $2::bigint) ON CONFLICT (role)"
        " DO UPDATE SET worker_id = excluded.worker_id WHERE roles.worker_id = excluded.worker_id"
        " OR roles.worker_id IS NULL OR roles.worker_id NOT IN"
        " (SELECT worker_id FROM workers WHERE state = 'alive') RETURNING 1"
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
