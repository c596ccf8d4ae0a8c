"""Statements of `ackbone.store.claims`, `dead_on_arrival`, `waiting` and `runs`, each for one task.
Bulk statements are behind `ackbone.store.tables`."""

from __future__ import annotations

import msgspec

from ackbone.store.conditions import TASK

_GIVEN_BACK = "worker_id = NULL, attempt = attempt - 1"


def _task(assignments: str, condition: str = "") -> str:
    return f"UPDATE queue_executions SET {assignments} WHERE {TASK}{condition}"


class ClaimsSql(msgspec.Struct, frozen=True, kw_only=True):
    hold: str = _task(
        "held = 'store', body = $4::bytea, body_info = $5::json, body_crc = $6::bigint",
        " AND held = 'broker'",
    )
    """task, body, body_info, body_crc: the row takes the message, if the broker holds it"""
    keep: str = _task("status = 'ready', due_at = at($4)", " AND status = 'open'")
    """task, now: a task that is `open` is ready"""
    count_failures: str = _task("attempt = $4::int, retry_count = $5::int")
    """task, attempt, retry_count"""
    found_again: str = _task("lost_by = NULL")
    """task: nobody has lost it any more"""
    wait_for_key: str = _task(f"status = 'waiting_key', {_GIVEN_BACK}")
    """task: gives the attempt back"""
    pass_on: str = _task(
        "status = 'ready', due_at = CASE WHEN due_at < at($4) THEN due_at ELSE at($4) END,"
        f" {_GIVEN_BACK}"
    )
    """task, now: gives the attempt back"""
    park: str = _task(f"status = 'parked', parked_kind = $4, error_message = $5, {_GIVEN_BACK}")
    """task, parked_kind, reason: gives the attempt back"""
    put_off: str = _task(f"status = 'ready', due_at = at($4), error_message = $5, {_GIVEN_BACK}")
    """task, due_at, reason: gives the attempt back"""
    expire: str = _task(
        "status = 'expired', completed_at = at($4), body = NULL,"
        " error_message = 'expired before it could run'"
    )
    """task, now"""
    fail: str = _task("status = 'failed', completed_at = at($5), error_message = $4, body = NULL")
    """task, error, now"""
    known_hash: str = f"SELECT body_sha256 FROM queue_executions WHERE {TASK}"
    """task → body_sha256"""
    dead_on_arrival: str = (
        "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name,"
        " event_name, status, held, worker_id, started_at, completed_at, error_message,"
        " body_sha256) VALUES ($1::uuid, $2, $3, $4, $5, $6, 'failed', 'store', $7::bigint, at($8),"
        " at($8), $9, $10::bytea) ON CONFLICT (tenant_id, subscription, message_id) DO NOTHING"
        " RETURNING 1"
    )
    """id, task, queue, type, worker_id, now, error, body_sha256 → a row if there was none"""
    complete_letter: str = (
        "UPDATE dead_letters SET body = $4::bytea, body_info = $5::json, body_crc = $6::bigint"
        f" WHERE {TASK} AND body IS NULL"
    )
    """task, body, body_info, body_crc: only if the dead letter has no body"""
    failure: str = f"SELECT reason FROM dead_letters WHERE {TASK} ORDER BY failed_at DESC LIMIT 1"
    """task → the reason of its dead letter"""

    own_source: str = (
        "INSERT INTO sources (subscription, worker_id) VALUES ($1, $2::bigint)"
        " ON CONFLICT (subscription, part) DO UPDATE SET worker_id = excluded.worker_id"
        " WHERE sources.worker_id = excluded.worker_id OR sources.worker_id IS NULL"
        " OR sources.worker_id NOT IN (SELECT worker_id FROM workers WHERE state = 'alive')"
        " RETURNING 1"
    )
    """subscription, worker → a row unless another living worker fetches from the source"""
    owners: str = (  # sorted: two batches wait for each other in one order
        "SELECT part, worker_id FROM sources WHERE subscription = $1 AND part = ANY($2::text[])"
        " ORDER BY part FOR UPDATE"
    )
    """subscription, parts → part, worker_id"""
    take_parts: str = (
        "INSERT INTO sources (subscription, part, worker_id, adopted_at)"
        " SELECT $1, value, $2::bigint, at($4) FROM unnest($3::text[]) AS value WHERE true"
        " ON CONFLICT (subscription, part) DO UPDATE"
        " SET worker_id = excluded.worker_id, adopted_at = excluded.adopted_at"
    )
    """subscription, worker, parts (sorted), now: the worker owns these parts, whoever did before"""
    take_places: str = (
        "INSERT INTO sources (subscription, n) VALUES ($1, $2::bigint)"
        " ON CONFLICT (subscription, part) DO UPDATE SET n = sources.n + excluded.n RETURNING n"
    )
    """subscription, how many → the last of the places that are taken in its order"""

    first_due: str
    """subscription, now → priority, microseconds until its first task that the store holds is due
    (NULL, or no row: it has none); the database's own time where none is given"""
    unresolved: str
    """→ a row if a message waits for a key that is free or done"""
    stuck: str
    """→ tenant, subscription, lane of conversations whose first message only waits for its turn"""


_OWNED = f"{TASK} AND worker_id = $4::bigint AND epoch = $5::int AND status = 'running'"


class RunsSql(msgspec.Struct, frozen=True, kw_only=True):
    """`token` is two parameters: worker id and epoch."""

    # Shared: nobody may take the message away between this look and the commit.
    fence: str = f"SELECT 1 FROM queue_executions WHERE {_OWNED} FOR SHARE"
    """task, token → a row if the run still owns its message; it keeps it until the end"""
    adopt: str = (
        "UPDATE queue_executions SET held = 'store', body = $6::bytea, body_info = $7::json,"
        f" body_crc = $8::bigint WHERE {_OWNED} RETURNING 1"
    )
    """task, token, body, body_info, body_crc → a row if the run still owns its message"""
    effect: str = (
        f"SELECT state, value, worker_id, epoch FROM effects WHERE {TASK} AND name = $4 FOR UPDATE"
    )
    """task, name → state, value, token"""
    begin_effect: str = (
        "INSERT INTO effects (tenant_id, subscription, message_id, name, state, worker_id, epoch,"
        " created_at) VALUES ($1, $2, $3, $4, 'begun', $5::bigint, $6::int, at($7))"
    )
    """task, name, token, now"""
    effect_raised: str = (
        f"UPDATE effects SET value = $5::bytea WHERE {TASK} AND name = $4 AND state = 'begun'"
    )
    """task, name, error"""
