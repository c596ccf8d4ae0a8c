"""Statements of `ackbone.store.approvals`."""

from __future__ import annotations

import msgspec

from ackbone.store.conditions import TASK

from .records import NAMED, NAMED_LIKE

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
