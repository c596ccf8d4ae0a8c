"""Statements of `ackbone.store.operations`, `parked`, `orchestration` and `letters`."""

from __future__ import annotations

import msgspec

from ackbone.store.conditions import KNOWN_EFFECT, TASK

_FOR_HANDLER = (
    "WHERE status = 'parked' AND parked_kind = $1 AND subscription = $2"
    " AND starts_with(error_message, $3) AND ($4::bool OR event_name = ANY($5::text[]))"
)
_READY = "UPDATE queue_executions AS q SET status = 'ready', due_at = at({}), parked_kind = NULL"
_TASKS = "RETURNING tenant_id, subscription, message_id"


class OperationsSql(msgspec.Struct, frozen=True, kw_only=True):
    write_letter: str = (
        "INSERT INTO dead_letters (id, tenant_id, subscription, message_id, queue_name, event_name,"
        " reason, error, retry_count, history, body, body_info, body_crc, failed_at)"
        " VALUES ($1::uuid, $2, $3, $4, $5, $6, $7, $8, $9::int, $10::json, $11::bytea, $12::json,"
        " $13::bigint, at($14))"
    )
    """The columns of a dead letter in the order of `bury`."""
    settle_letter: str = (
        "UPDATE dead_letters SET state = $2, settled_at = at($4), replay_id = $3"
        f" WHERE id = $1::uuid AND state = 'open' {_TASKS}"
    )
    """id, state, replay_id, now → the task of the letter, if it was open."""
    letter_state: str = (
        "SELECT state, us(settled_at), replay_id FROM dead_letters WHERE id = $1::uuid"
    )
    """id → state, settled_at, replay_id"""
    unknown_effects: str = (
        f"SELECT name FROM effects WHERE {TASK} AND state = 'begun' ORDER BY name"
    )
    """task → the names of effects that began and did not end"""
    effect_is_done: str = f"SELECT 1 FROM effects WHERE {TASK} AND name = $4 AND state = 'done'"
    """task, name → a row if it is"""
    effect_done: str = (
        f"UPDATE effects SET state = 'done', value = $5::bytea, done_at = at($6) WHERE {TASK}"
        " AND name = $4 AND state = 'begun' RETURNING 1"
    )
    """task, name, value, now → a row if it was begun"""
    effect_cleared: str = (
        f"DELETE FROM effects WHERE {TASK} AND name = $4 AND state = 'begun' RETURNING 1"
    )
    """task, name → a row if it was begun"""
    pause_queue: str = (
        "INSERT INTO sources (subscription, paused_at) VALUES ($1, at($2))"
        " ON CONFLICT (subscription, part) DO UPDATE SET paused_at = excluded.paused_at"
        " WHERE sources.paused_at IS NULL RETURNING 1"
    )
    """queue, now → a row if it was not paused"""
    unpause_queue: str = (
        "UPDATE sources SET paused_at = NULL WHERE subscription = $1 AND paused_at IS NOT NULL"
        " RETURNING 1"
    )
    """queue → a row if it was paused"""

    task_state: str = f"SELECT status, parked_kind FROM queue_executions WHERE {TASK} FOR UPDATE"
    """task → status, parked_kind; nobody else changes the row until the end"""
    resume: str = f"{_READY.format('$4')} WHERE {TASK} AND status = 'parked'"
    """task, now"""
    wait_for_handler: str = f"SELECT 1 FROM queue_executions {_FOR_HANDLER} LIMIT 1"
    """parked_kind, subscription, beginning of the reason, any type?, types → a row if any waits"""
    handler_came: str = f"{_READY.format('$6')} {_FOR_HANDLER} {_TASKS}"
    """the same, now → the tasks that are ready now"""
    wait_for_effect: str = f"SELECT 1 FROM queue_executions q WHERE {KNOWN_EFFECT} LIMIT 1"
    """→ a row if a message is parked for an effect whose result was recorded since"""
    effect_known: str = f"{_READY.format('$1')} WHERE {KNOWN_EFFECT} {_TASKS}"
    """now → the tasks that are ready now"""
    parked_task: str = (
        "SELECT queue_name, event_name, trace_id, idem_key, lane, retry_count, history::text, body,"
        f" body_info::text FROM queue_executions WHERE {TASK}"
    )
    """task → queue_name, event_name, trace_id, idem_key, lane, retry_count, history, body,
    body_info"""
    end_parked: str = (
        "UPDATE queue_executions SET status = $4, completed_at = at($6), error_message = $5,"
        f" body = NULL WHERE {TASK} AND status = 'parked'"
    )
    """task, status, reason, now"""
    free_key: str = (
        "DELETE FROM idempotency_keys WHERE tenant_id = $1 AND subscription = $2 AND key = $3"
        " AND message_id = $4"
    )
    """tenant, subscription, key, message id"""

    record_task: str = (
        "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name,"
        " event_name, status, held, worker_id, started_at, completed_at, error_message,"
        " retry_count, idem_key, result) VALUES ($1::uuid, $2, $3, $4, $5, $6, $7, 'store',"
        " $8::bigint, at($9), at($10), $11, $12::int, $13, $14::bytea)"
        " ON CONFLICT (tenant_id, subscription, message_id) DO NOTHING RETURNING 1"
    )
    """id, task, queue, type, status, worker_id, now, completed_at, error, retry_count, key, result
    → a row if there was none"""
    created: str = (
        "SELECT 1 FROM event_log WHERE tenant_id = $1 AND subscription = $2 AND task_id = $3"
        " AND event_type = 'task.created' LIMIT 1"
    )
    """task → a row if it has a `task.created` event"""
    ask_to_cancel: str = (
        f"UPDATE queue_executions SET cancel_at = at($4) WHERE {TASK} AND status = 'running'"
    )
    """task, now"""
    discard_task: str = (
        "UPDATE queue_executions SET status = 'discarded', completed_at = at($5),"
        f" error_message = $4, body = NULL, due_at = NULL WHERE {TASK}"
        " RETURNING queue_name, event_name, trace_id, idem_key, lane"
    )
    """task, reason, now → queue_name, event_name, trace_id, idem_key, lane"""
