"""Statements of `ackbone.store.operations`, `parked`, `orchestration` and `outcomes`."""

from __future__ import annotations

import msgspec

from ackbone.store.conditions import KNOWN_EFFECT, TASK

from .records import NAMED, NAMED_LIKE

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


COLUMNS = (
    "uuid_send(id), tenant_id, subscription, message_id, queue_name, event_name, payload_sha256,"
    " rule, reason, state, four_eyes, us(asked_at), us(expires_at), first_by, us(first_at),"
    " answered_by, us(answered_at), note"
)
_OPEN = "WHERE id = $1::uuid AND state = 'pending' AND expires_at > at($2)"
_ANSWER = "UPDATE approvals SET state = '{}', answered_by = $3, answered_at = at($4), note = $5"


class ApprovalsSql(msgspec.Struct, frozen=True, kw_only=True):
    """An approval is returned as the columns that `of_row` reads."""

    ask: str = (
        "INSERT INTO approvals (id, tenant_id, subscription, message_id, queue_name, event_name,"
        " payload_sha256, rule, reason, four_eyes, keep_rejected, asked_at, expires_at)"
        " VALUES ($1::uuid, $2, $3, $4, $5, $6, $7::bytea, $8, $9, $10::int, $11::int, at($12),"
        " at($13))"
    )
    """The columns of an approval in the order of `ask`."""
    approve: str = (
        f"{_ANSWER.format('approved')} {_OPEN}"
        " AND (four_eyes = 0 OR (first_by IS NOT NULL AND first_by <> $3))"
        f" RETURNING {COLUMNS}"
    )
    """id, expiry, by, now, note → the approval, if this is the yes that decides"""
    first_yes: str = (
        f"UPDATE approvals SET first_by = $3, first_at = at($4), note = $5 {_OPEN}"
        f" AND four_eyes = 1 AND first_by IS NULL RETURNING {COLUMNS}"
    )
    """id, expiry, by, now, note → the approval, if this is the first of two"""
    reject: str = f"{_ANSWER.format('rejected')} {_OPEN} RETURNING {COLUMNS}, keep_rejected"
    """id, expiry, by, now, note → the approval and keep_rejected"""
    expire: str = (
        "UPDATE approvals SET state = 'expired', answered_at = at($1) WHERE id IN (SELECT id"
        " FROM approvals WHERE state = 'pending' AND expires_at <= at($1) ORDER BY expires_at"
        f" LIMIT $2::int FOR UPDATE SKIP LOCKED) RETURNING {COLUMNS}, keep_rejected"
    )
    """now, limit → approvals and keep_rejected"""
    withdraw: str = (
        "UPDATE approvals SET state = 'rejected', answered_by = $4, answered_at = at($5), note = $6"
        f" WHERE {TASK} AND state = 'pending' RETURNING uuid_send(id), rule"
    )
    """task, by, now, note → id, rule"""
    pending: str = f"SELECT uuid_send(id) FROM approvals WHERE {TASK} AND state = 'pending'"
    """task → id"""
    one: str = f"SELECT {COLUMNS} FROM approvals WHERE id = $1::uuid"
    """id → the approval"""
    listed: str = (
        f"SELECT {COLUMNS} FROM approvals WHERE ($2::uuid IS NULL OR id > $2::uuid)"
        " AND ($3::text IS NULL OR state = $3) AND ($4::text IS NULL OR queue_name = $4)"
        " AND ($5::text IS NULL OR rule = $5) AND ($6::text IS NULL OR tenant_id = $6)"
        " ORDER BY id LIMIT $1::int"
    )
    """limit, after this id, state, queue, rule, tenant → approvals, the oldest first"""
    named: str = f"SELECT {COLUMNS} FROM approvals {NAMED}"
    """as `RecordsSql.letters_named`"""
    named_like: str = f"SELECT {COLUMNS} FROM approvals {NAMED_LIKE}"
    """as `RecordsSql.letters_named_like`"""
