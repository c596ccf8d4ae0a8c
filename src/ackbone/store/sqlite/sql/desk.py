"""Statements of `ackbone.store.delivery_desk`."""

from ackbone.store.delivery_desk import AGREES, CHANGED_IN, RETRIED_FROM
from ackbone.store.parcel_rows import LIVE
from ackbone.store.statements import DeskSql

_TOLD = "RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), channel, lane"

DESK = DeskSql(
    pause="INSERT OR IGNORE INTO roles (role) VALUES (?1) RETURNING 1",
    unpause="DELETE FROM roles WHERE role = ?1 RETURNING 1",
    retry=(
        "UPDATE deliveries SET status = 'pending', due_at = ?2, retry_count = 0,"
        f" last_attempt_at = NULL, expires_at = NULL, {AGREES} WHERE id = ?1 AND {RETRIED_FROM}"
        f" {_TOLD}"
    ),
    edit=(
        "UPDATE deliveries SET content = ?2 WHERE id = ?1 AND receipts IS NULL"
        f" AND {CHANGED_IN} {_TOLD}"
    ),
    discard=(
        "UPDATE deliveries SET status = 'discarded', due_at = ?2"
        f" WHERE id = ?1 AND {CHANGED_IN} {_TOLD}"
    ),
    state="SELECT status, receipts IS NOT NULL FROM deliveries WHERE id = ?1",
    promote=(
        "UPDATE deliveries SET status = 'pending', due_at = ?2 WHERE rowid = (SELECT rowid"
        f" FROM deliveries WHERE lane = ?1 AND {LIVE} AND status = 'queued' ORDER BY rowid LIMIT 1)"
    ),
)
