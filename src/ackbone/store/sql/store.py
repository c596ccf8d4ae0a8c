"""Statements of `ackbone.store.base` and `notices`."""

from __future__ import annotations

import msgspec

from ackbone.store.conditions import UNCOMMON

# All history is in the table, so every part of `busy` and `stuck` is answered by an index. UNCOMMON
# repeats the words of a partial index, or it would not be used.
OURS = "subscription = ANY($1::text[])"
SENT = "EXISTS (SELECT 1 FROM outbox WHERE queue_name = ANY($1::text[]))"
_RUNNING = f"EXISTS (SELECT 1 FROM queue_executions WHERE status = 'running' AND {OURS})"
_AMONG = f"FROM queue_executions WHERE status IN ({{}}) AND {UNCOMMON} AND {OURS}"
_WAITING = _AMONG.format("'ready', 'queued', 'waiting_key', 'open'")
_READY = _AMONG.format("'ready'")
_BEHIND = _AMONG.format("'queued', 'waiting_key', 'open'")


def busy(sent: str = SENT) -> str:
    """`sent`: a condition that holds if anything of the subscriptions was sent and not taken."""
    return f"SELECT {sent} OR {_RUNNING} OR EXISTS (SELECT 1 {_WAITING})"


def stuck(sent: str = SENT) -> str:
    return (
        f"SELECT CASE WHEN {sent} OR {_RUNNING} OR EXISTS (SELECT 1 {_READY}) THEN 0"
        f" ELSE (SELECT count(*) {_BEHIND}) END"
    )


class StoreSql(msgspec.Struct, frozen=True, kw_only=True):
    to_cancel: str = (
        "SELECT tenant_id, subscription, message_id FROM queue_executions"
        " WHERE worker_id = $1::bigint AND status = 'running' AND cancel_at IS NOT NULL"
    )
    """worker → the tasks that it runs and that are to be cancelled"""
    suspects_due: str
    """subscriptions → subscription, type, how many run in a small group, how many run alone; by
    `read_due`"""
    paused: str = "SELECT subscription FROM sources WHERE paused_at IS NOT NULL"
    """→ subscriptions"""
    busy: str = busy()
    """subscriptions → whether anything of them waits, runs or is due later, parked messages
    aside"""
    stuck: str = stuck()
    """subscriptions → how many messages are left, if nothing is ready and nothing runs. Such a
    message waits for a parked one, or for one whose copy is with the broker."""
    holds_role: str = "SELECT 1 FROM roles WHERE role = $1 AND worker_id = $2::bigint"
    """role, worker → a row if the worker holds it"""
    take_role: str = (
        "INSERT INTO roles (role, worker_id) VALUES ($1, $2::bigint) ON CONFLICT (role)"
        " DO UPDATE SET worker_id = excluded.worker_id WHERE roles.worker_id = excluded.worker_id"
        " OR roles.worker_id IS NULL OR roles.worker_id NOT IN"
        " (SELECT worker_id FROM workers WHERE state = 'alive') RETURNING 1"
    )
    """role, worker → a row if the role was free"""
    identity: str
    """→ the id of this store, if it has one"""
    set_identity: str
    """id"""
    ended_tasks: str
    """tasks as a JSON array of [tenant, subscription, message id] → task, event_name, result,
    retry_count, error_message, idem_key, name of the worker that ran it"""
