"""Statements of `ackbone.store.delivery_desk`."""

from ackbone.store.delivery_desk import AGREES, CHANGED_IN, RETRIED_FROM
from ackbone.store.parcel_rows import LIVE
from ackbone.store.postgres.arrays import moment
from ackbone.store.statements import DeskSql

_TOLD = "RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), channel, lane"

DESK = DeskSql(
    pause="INSERT INTO roles (role) VALUES ($1) ON CONFLICT (role) DO NOTHING RETURNING 1",
    unpause="DELETE FROM roles WHERE role = $1 RETURNING 1",
    retry=(
        f"UPDATE deliveries SET status = 'pending', due_at = {moment('$2::bigint')},"
        f" retry_count = 0, last_attempt_at = NULL, expires_at = NULL, {AGREES} WHERE id = $1"
        f" AND {RETRIED_FROM} {_TOLD}"
    ),
    edit=(
        "UPDATE deliveries SET content = $2 WHERE id = $1 AND receipts IS NULL"
        f" AND {CHANGED_IN} {_TOLD}"
    ),
    discard=(
        f"UPDATE deliveries SET status = 'discarded', due_at = {moment('$2::bigint')}"
        f" WHERE id = $1 AND {CHANGED_IN} {_TOLD}"
    ),
    state="SELECT status, receipts IS NOT NULL FROM deliveries WHERE id = $1",
    promote=(
        f"UPDATE deliveries SET status = 'pending', due_at = {moment('$2::bigint')}"
        f" WHERE id = (SELECT id FROM deliveries WHERE lane = $1 AND {LIVE} AND status = 'queued'"
        " ORDER BY seq LIMIT 1)"
    ),
)
