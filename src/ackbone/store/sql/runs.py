"""Statements of `ackbone.store.runs`."""

from __future__ import annotations

import msgspec

from ackbone.store.conditions import TASK

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
