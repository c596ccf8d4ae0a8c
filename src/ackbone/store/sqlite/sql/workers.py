"""Statements of `ackbone.store.workers`."""

from ackbone.store.statements import WorkersSql

from .operations import TASK

_RUNNING = (
    "SELECT q.tenant_id, q.subscription, q.message_id, q.worker_id, w.state, w.name, q.queue_name,"
    " q.event_name, q.attempt, q.crashes, q.idem_key, q.lane, q.history, q.body, q.body_info,"
    " q.trace_id FROM queue_executions q LEFT JOIN workers w ON w.worker_id = q.worker_id"
    " WHERE q.status = 'running'"
)

WORKERS = WorkersSql(
    name="SELECT name FROM workers WHERE worker_id = ?1",
    announce="UPDATE workers SET offers = ?2 WHERE worker_id = ?1",
    leaving="UPDATE workers SET state = 'leaving' WHERE worker_id = ?1 AND state = 'alive'",
    end=(
        "UPDATE workers SET state = ?2, ended_at = ?3 WHERE worker_id = ?1"
        " AND state IN ('alive', 'leaving')"
    ),
    forget="DELETE FROM workers WHERE worker_id = ?1 AND state = 'left'",
    ended=(
        "SELECT name FROM workers WHERE name IN (SELECT value FROM json_each(?1))"
        " GROUP BY name HAVING max(state IN ('alive', 'leaving')) = 0"
    ),
    free_sources="UPDATE sources SET worker_id = NULL WHERE worker_id = ?1",
    running=f"{_RUNNING} AND q.worker_id = ?1",
    running_of_the_gone=f"{_RUNNING} AND coalesce(w.state, 'left') IN ('dead', 'left')",
    give_back=(
        "UPDATE queue_executions SET status = CASE held WHEN 'store' THEN 'ready' ELSE 'open' END,"
        " worker_id = NULL, epoch = epoch + 1, crashes = ?4, attempt = ?5,"
        " history = coalesce(?6, history), lost_by = coalesce(?7, lost_by), due_at = ?8"
        f" WHERE {TASK}"
    ),
    quarantine=(
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, crashes = ?4,"
        f" error_message = ?5, history = ?6, completed_at = ?7, body = NULL WHERE {TASK}"
    ),
)
