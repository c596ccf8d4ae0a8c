"""Statements of `ackbone.store.workers`."""

from ackbone.store.postgres.arrays import moment
from ackbone.store.statements import WorkersSql

from .operations import TASK

_RUNNING = (
    "SELECT q.tenant_id, q.subscription, q.message_id, q.worker_id, w.state, w.name, q.queue_name,"
    " q.event_name, q.attempt, q.crashes, q.idem_key, q.lane, q.history::text, q.body,"
    " q.body_info::text, q.trace_id FROM queue_executions q LEFT JOIN workers w"
    " ON w.worker_id = q.worker_id WHERE q.status = 'running'"
    " AND coalesce(w.state, 'left') IN ('dead', 'left') {}"
    " ORDER BY q.tenant_id, q.subscription, q.message_id LIMIT 1000 FOR UPDATE OF q"
)

WORKERS = WorkersSql(
    name="SELECT name FROM workers WHERE worker_id = $1::bigint",
    announce="UPDATE workers SET offers = $2 WHERE worker_id = $1::bigint",
    leaving=(
        "UPDATE workers SET state = 'leaving' WHERE worker_id = $1::bigint AND state = 'alive'"
    ),
    end=(
        f"UPDATE workers SET state = $2, ended_at = {moment('$3::bigint')}"
        " WHERE worker_id = $1::bigint AND state IN ('alive', 'leaving')"
    ),
    forget="DELETE FROM workers WHERE worker_id = $1::bigint AND state = 'left'",
    ended=(
        "SELECT name FROM workers WHERE name = ANY($1::text[])"
        " GROUP BY name HAVING NOT bool_or(state IN ('alive', 'leaving'))"
    ),
    free_sources="UPDATE sources SET worker_id = NULL WHERE worker_id = $1::bigint",
    running=_RUNNING.format("AND q.worker_id = $1::bigint"),
    running_of_the_gone=_RUNNING.format(""),
    give_back=(
        "UPDATE queue_executions SET status = CASE held WHEN 'store' THEN 'ready' ELSE 'open' END,"
        " worker_id = NULL, epoch = epoch + 1, crashes = $4::int, attempt = $5::int,"
        " history = coalesce($6, history::text)::json, lost_by = coalesce($7, lost_by),"
        f" due_at = {moment('$8::bigint')} WHERE {TASK}"
    ),
    quarantine=(
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, crashes = $4::int,"
        f" error_message = $5, history = $6::json, completed_at = {moment('$7::bigint')},"
        f" body = NULL WHERE {TASK}"
    ),
)
