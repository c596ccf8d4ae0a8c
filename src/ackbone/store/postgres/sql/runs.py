"""Statements of `ackbone.store.runs`."""

from ackbone.store.postgres.arrays import moment
from ackbone.store.statements import RunsSql

from .operations import TASK

_OWNED = f"{TASK} AND worker_id = $4::bigint AND epoch = $5::int AND status = 'running'"

RUNS = RunsSql(
    # Shared: nobody may take the message away between this look and the commit.
    fence=f"SELECT 1 FROM queue_executions WHERE {_OWNED} FOR SHARE",
    adopt=(
        "UPDATE queue_executions SET held = 'store', body = $6::bytea, body_info = $7::json,"
        f" body_crc = $8::bigint WHERE {_OWNED} RETURNING 1"
    ),
    effect=(
        f"SELECT state, value, worker_id, epoch FROM effects WHERE {TASK} AND name = $4 FOR UPDATE"
    ),
    begin_effect=(
        "INSERT INTO effects (tenant_id, subscription, message_id, name, state, worker_id, epoch,"
        " created_at) VALUES ($1, $2, $3, $4, 'begun', $5::bigint, $6::int,"
        f" {moment('$7::bigint')})"
    ),
    effect_raised=(
        f"UPDATE effects SET value = $5::bytea WHERE {TASK} AND name = $4 AND state = 'begun'"
    ),
)
