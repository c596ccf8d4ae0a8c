"""Statements of `ackbone.store.approvals`."""

from ackbone.store.postgres.arrays import moment, us
from ackbone.store.statements import ApprovalsSql

from .operations import TASK
from .records import NAMED, NAMED_LIKE

COLUMNS = (
    "uuid_send(id), tenant_id, subscription, message_id, queue_name, event_name, payload_sha256,"
    f" rule, reason, state, four_eyes, {us('asked_at')}, {us('expires_at')}, first_by,"
    f" {us('first_at')}, answered_by, {us('answered_at')}, note"
)
_OPEN = f"WHERE id = $1::uuid AND state = 'pending' AND expires_at > {moment('$2::bigint')}"
_ANSWER = (
    "UPDATE approvals SET state = '{}', answered_by = $3,"
    f" answered_at = {moment('$4::bigint')}, note = $5"
)

APPROVALS = ApprovalsSql(
    ask=(
        "INSERT INTO approvals (id, tenant_id, subscription, message_id, queue_name, event_name,"
        " payload_sha256, rule, reason, four_eyes, keep_rejected, asked_at, expires_at)"
        " VALUES ($1::uuid, $2, $3, $4, $5, $6, $7::bytea, $8, $9, $10::int, $11::int,"
        f" {moment('$12::bigint')}, {moment('$13::bigint')})"
    ),
    approve=(
        f"{_ANSWER.format('approved')} {_OPEN}"
        " AND (four_eyes = 0 OR (first_by IS NOT NULL AND first_by <> $3))"
        f" RETURNING {COLUMNS}"
    ),
    first_yes=(
        f"UPDATE approvals SET first_by = $3, first_at = {moment('$4::bigint')}, note = $5 {_OPEN}"
        f" AND four_eyes = 1 AND first_by IS NULL RETURNING {COLUMNS}"
    ),
    reject=f"{_ANSWER.format('rejected')} {_OPEN} RETURNING {COLUMNS}, keep_rejected",
    expire=(
        f"UPDATE approvals SET state = 'expired', answered_at = {moment('$1::bigint')}"
        " WHERE id IN (SELECT id FROM approvals WHERE state = 'pending'"
        f" AND expires_at <= {moment('$1::bigint')} ORDER BY expires_at LIMIT $2::int"
        f" FOR UPDATE SKIP LOCKED) RETURNING {COLUMNS}, keep_rejected"
    ),
    withdraw=(
        "UPDATE approvals SET state = 'rejected', answered_by = $4,"
        f" answered_at = {moment('$5::bigint')}, note = $6 WHERE {TASK} AND state = 'pending'"
        " RETURNING uuid_send(id), rule"
    ),
    pending=f"SELECT uuid_send(id) FROM approvals WHERE {TASK} AND state = 'pending'",
    one=f"SELECT {COLUMNS} FROM approvals WHERE id = $1::uuid",
    listed=(
        f"SELECT {COLUMNS} FROM approvals WHERE ($2::uuid IS NULL OR id > $2::uuid)"
        " AND ($3::text IS NULL OR state = $3) AND ($4::text IS NULL OR queue_name = $4)"
        " AND ($5::text IS NULL OR rule = $5) AND ($6::text IS NULL OR tenant_id = $6)"
        " ORDER BY id LIMIT $1::int"
    ),
    named=f"SELECT {COLUMNS} FROM approvals {NAMED}",
    named_like=f"SELECT {COLUMNS} FROM approvals {NAMED_LIKE}",
)
