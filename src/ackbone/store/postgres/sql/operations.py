"""Statements of `ackbone.store.operations`, `parked`, `orchestration` and `letters`."""

from ackbone.store.conditions import KNOWN_EFFECT
from ackbone.store.postgres.arrays import moment, us
from ackbone.store.statements import OperationsSql

TASK = "tenant_id = $1 AND subscription = $2 AND message_id = $3"

_FOR_HANDLER = (
    "WHERE status = 'parked' AND parked_kind = $1 AND subscription = $2"
    " AND starts_with(error_message, $3) AND ($4::bool OR event_name = ANY($5::text[]))"
)
_READY = "UPDATE queue_executions q SET status = 'ready', due_at = {}, parked_kind = NULL"
_TASKS = "RETURNING tenant_id, subscription, message_id"

OPERATIONS = OperationsSql(
    write_letter=(
        "INSERT INTO dead_letters (id, tenant_id, subscription, message_id, queue_name, event_name,"
        " reason, error, retry_count, history, body, body_info, body_crc, failed_at)"
        " VALUES ($1::uuid, $2, $3, $4, $5, $6, $7, $8, $9::int, $10::json, $11::bytea, $12::json,"
        f" $13::bigint, {moment('$14::bigint')})"
    ),
    settle_letter=(
        f"UPDATE dead_letters SET state = $2, settled_at = {moment('$4::bigint')}, replay_id = $3"
        " WHERE id = $1::uuid AND state = 'open' RETURNING tenant_id, subscription, message_id"
    ),
    letter_state=(
        f"SELECT state, {us('settled_at')}, replay_id FROM dead_letters WHERE id = $1::uuid"
    ),
    unknown_effects=f"SELECT name FROM effects WHERE {TASK} AND state = 'begun' ORDER BY name",
    effect_is_done=f"SELECT 1 FROM effects WHERE {TASK} AND name = $4 AND state = 'done'",
    effect_done=(
        f"UPDATE effects SET state = 'done', value = $5::bytea, done_at = {moment('$6::bigint')}"
        f" WHERE {TASK} AND name = $4 AND state = 'begun' RETURNING 1"
    ),
    effect_cleared=(
        f"DELETE FROM effects WHERE {TASK} AND name = $4 AND state = 'begun' RETURNING 1"
    ),
    pause_queue=(
        f"INSERT INTO sources (subscription, paused_at) VALUES ($1, {moment('$2::bigint')})"
        " ON CONFLICT (subscription, part) DO UPDATE SET paused_at = excluded.paused_at"
        " WHERE sources.paused_at IS NULL RETURNING 1"
    ),
    unpause_queue=(
        "UPDATE sources SET paused_at = NULL WHERE subscription = $1 AND paused_at IS NOT NULL"
        " RETURNING 1"
    ),
    task_state=f"SELECT status, parked_kind FROM queue_executions WHERE {TASK} FOR UPDATE",
    resume=f"{_READY.format(moment('$4::bigint'))} WHERE {TASK} AND status = 'parked'",
    wait_for_handler=f"SELECT 1 FROM queue_executions {_FOR_HANDLER} LIMIT 1",
    handler_came=f"{_READY.format(moment('$6::bigint'))} {_FOR_HANDLER} {_TASKS}",
    wait_for_effect=f"SELECT 1 FROM queue_executions q WHERE {KNOWN_EFFECT} LIMIT 1",
    effect_known=f"{_READY.format(moment('$1::bigint'))} WHERE {KNOWN_EFFECT} {_TASKS}",
    parked_task=(
        "SELECT queue_name, event_name, trace_id, idem_key, lane, retry_count, history::text, body,"
        f" body_info::text FROM queue_executions WHERE {TASK}"
    ),
    end_parked=(
        f"UPDATE queue_executions SET status = $4, completed_at = {moment('$6::bigint')},"
        f" error_message = $5, body = NULL WHERE {TASK} AND status = 'parked'"
    ),
    free_key=(
        "DELETE FROM idempotency_keys WHERE tenant_id = $1 AND subscription = $2 AND key = $3"
        " AND message_id = $4"
    ),
    record_task=(
        "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name,"
        " event_name, status, held, worker_id, started_at, completed_at, error_message,"
        " retry_count, idem_key, result) VALUES ($1::uuid, $2, $3, $4, $5, $6, $7, 'store',"
        f" $8::bigint, {moment('$9::bigint')}, {moment('$10::bigint')}, $11, $12::int, $13,"
        " $14::bytea) ON CONFLICT (tenant_id, subscription, message_id) DO NOTHING RETURNING 1"
    ),
    created=(
        "SELECT 1 FROM event_log WHERE tenant_id = $1 AND subscription = $2 AND task_id = $3"
        " AND event_type = 'task.created' LIMIT 1"
    ),
    ask_to_cancel=(
        f"UPDATE queue_executions SET cancel_at = {moment('$4::bigint')} WHERE {TASK}"
        " AND status = 'running'"
    ),
    discard_task=(
        f"UPDATE queue_executions SET status = 'discarded', completed_at = {moment('$5::bigint')},"
        f" error_message = $4, body = NULL, due_at = NULL WHERE {TASK}"
        " RETURNING queue_name, event_name, trace_id, idem_key, lane"
    ),
)
