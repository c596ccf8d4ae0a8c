"""Statements of `ackbone.store.runs`."""

from ackbone.store.statements import RunsSql

from .operations import TASK

_OWNED = f"{TASK} AND worker_id = ?4 AND epoch = ?5 AND status = 'running'"

RUNS = RunsSql(
    fence=f"SELECT 1 FROM queue_executions WHERE {_OWNED}",
    adopt=(
        "UPDATE queue_executions SET held = 'store', body = ?6, body_info = ?7, body_crc = ?8"
        f" WHERE {_OWNED} RETURNING 1"
    ),
    effect=f"SELECT state, value, worker_id, epoch FROM effects WHERE {TASK} AND name = ?4",
    begin_effect=(
        "INSERT INTO effects (tenant_id, subscription, message_id, name, state, worker_id, epoch,"
        " created_at) VALUES (?1, ?2, ?3, ?4, 'begun', ?5, ?6, ?7)"
    ),
    effect_raised=(f"UPDATE effects SET value = ?5 WHERE {TASK} AND name = ?4 AND state = 'begun'"),
)
