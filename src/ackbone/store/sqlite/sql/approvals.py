"""Statements of `ackbone.store.approvals`."""

from ackbone.store.statements import ApprovalsSql

from .operations import TASK
from .records import NAMED, NAMED_LIKE

COLUMNS = (
    "id, tenant_id, subscription, message_id, queue_name, event_name, payload_sha256, rule, reason,"
    " state, four_eyes, asked_at, expires_at, first_by, first_at, answered_by, answered_at, note"
)
_OPEN = "WHERE id = id_of(?1) AND state = 'pending' AND expires_at > ?2"
_ANSWER = "UPDATE approvals SET state = '{}', answered_by = ?3, answered_at = ?4, note = ?5"

APPROVALS = ApprovalsSql(
    ask=(
        "INSERT INTO approvals (id, tenant_id, subscription, message_id, queue_name, event_name,"
        " payload_sha256, rule, reason, four_eyes, keep_rejected, asked_at, expires_at)"
        " VALUES (id_of(?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    ),
    approve=(
        f"{_ANSWER.format('approved')} {_OPEN}"
        " AND (four_eyes = 0 OR (first_by IS NOT NULL AND first_by <> ?3))"
        f" RETURNING {COLUMNS}"
    ),
    first_yes=(
        f"UPDATE approvals SET first_by = ?3, first_at = ?4, note = ?5 {_OPEN} AND four_eyes = 1"
        f" AND first_by IS NULL RETURNING {COLUMNS}"
    ),
    reject=f"{_ANSWER.format('rejected')} {_OPEN} RETURNING {COLUMNS}, keep_rejected",
    expire=(
        "UPDATE approvals SET state = 'expired', answered_at = ?1 WHERE id IN (SELECT id"
        " FROM approvals WHERE state = 'pending' AND expires_at <= ?1 ORDER BY expires_at LIMIT ?2)"
        f" RETURNING {COLUMNS}, keep_rejected"
    ),
    withdraw=(
        "UPDATE approvals SET state = 'rejected', answered_by = ?4, answered_at = ?5, note = ?6"
        f" WHERE {TASK} AND state = 'pending' RETURNING id, rule"
    ),
    pending=f"SELECT id FROM approvals WHERE {TASK} AND state = 'pending'",
    one=f"SELECT {COLUMNS} FROM approvals WHERE id = id_of(?1)",
    listed=(
        f"SELECT {COLUMNS} FROM approvals WHERE (?2 IS NULL OR id > id_of(?2))"
        " AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR queue_name = ?4)"
        " AND (?5 IS NULL OR rule = ?5) AND (?6 IS NULL OR tenant_id = ?6)"
        " ORDER BY id LIMIT ?1"
    ),
    named=f"SELECT {COLUMNS} FROM approvals {NAMED}",
    named_like=f"SELECT {COLUMNS} FROM approvals {NAMED_LIKE}",
)
