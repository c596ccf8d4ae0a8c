"""Statements of `ackbone.store.workers`."""

from __future__ import annotations

import msgspec

from ackbone.store.conditions import TASK

RUNNING = (
    "SELECT q.tenant_id, q.subscription, q.message_id, q.worker_id, w.state, w.name, q.queue_name,"
    " q.event_name, q.attempt, q.crashes, q.idem_key, q.lane, q.history::text, q.body,"
    " q.body_info::text, q.trace_id FROM queue_executions q LEFT JOIN workers w"
    " ON w.worker_id = q.worker_id WHERE q.status = 'running'"
)
GONE = "coalesce(w.state, 'left') IN ('dead', 'left')"


class WorkersSql(msgspec.Struct, frozen=True, kw_only=True):
    name: str = "SELECT name FROM workers WHERE worker_id = $1::bigint"
    """worker → its name"""
    announce: str = "UPDATE workers SET offers = $2 WHERE worker_id = $1::bigint"
    """worker, offers"""
    leaving: str = (
        "UPDATE workers SET state = 'leaving' WHERE worker_id = $1::bigint AND state = 'alive'"
    )
    """worker"""
    end: str = (
        "UPDATE workers SET state = $2, ended_at = at($3) WHERE worker_id = $1::bigint"
        " AND state IN ('alive', 'leaving')"
    )
    """worker, state (`left` or `dead`), now"""
    forget: str = "DELETE FROM workers WHERE worker_id = $1::bigint AND state = 'left'"
    """worker: delete its row, if it has left"""
    ended: str = (
        "SELECT name FROM workers WHERE name = ANY($1::text[]) GROUP BY name"
        " HAVING count(*) FILTER (WHERE state IN ('alive', 'leaving')) = 0"
    )
    """list of names → those whose workers have died or left"""
    free_sources: str = "UPDATE sources SET worker_id = NULL WHERE worker_id = $1::bigint"
    """worker"""
    running: str
    """worker → the columns of `workers.Running`, locked; the worker has left"""
    running_of_the_gone: str
    """→ the same, of all workers that are not there any more"""
    give_back: str = (
        "UPDATE queue_executions SET status = CASE held WHEN 'store' THEN 'ready' ELSE 'open' END,"
        " worker_id = NULL, epoch = epoch + 1, crashes = $4::int, attempt = $5::int,"
        " history = coalesce($6, history::text)::json, lost_by = coalesce($7, lost_by),"
        f" due_at = at($8) WHERE {TASK}"
    )
    """task, crashes, attempt, history or NULL, lost_by or NULL, now"""
    quarantine: str = (
        "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, crashes = $4::int,"
        " error_message = $5, history = $6::json, completed_at = at($7), body = NULL"
        f" WHERE {TASK}"
    )
    """task, crashes, error, history, now"""
