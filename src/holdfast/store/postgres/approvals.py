"""Approvals: asked in finish's transaction, answered once, expired by a relay.

Every change of a row is a compare-and-set on `pending`, in the transaction that also moves the
task: one answer wins, and its message runs once or never.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core import events
from holdfast.core.approvals import Approval, ApprovalFilter
from holdfast.core.errors import Conflict, NotFound
from holdfast.core.events import Entry
from holdfast.core.ids import uuid7_bytes
from holdfast.core.outcome import Question, Status
from holdfast.core.store import Approved, Finished
from holdfast.core.text import storable
from holdfast.store.approval import (
    BATCH,
    Answering,
    answer_data,
    approved,
    asked,
    identity_of,
    moment_text,
    of_row,
    why_not,
)
from holdfast.store.seen import text_id, uuid_text

from . import arrays, parked
from .arrays import moment
from .change import Change
from .database import Tx
from .tasks import BEGUN, NOW, PK, Identity
from .views import us

if TYPE_CHECKING:
    from .store import PostgresStore

COLUMNS = (
    "uuid_send(id), tenant_id, subscription, message_id, queue_name, event_name, payload_sha256,"
    f" rule, reason, state, four_eyes, {us('asked_at')}, {us('expires_at')}, first_by,"
    f" {us('first_at')}, answered_by, {us('answered_at')}, note"
)
_ASK = (
    "INSERT INTO approvals (id, tenant_id, subscription, message_id, queue_name, event_name,"
    " payload_sha256, rule, reason, four_eyes, keep_rejected, asked_at, expires_at)"
    " VALUES ($1::uuid, $2, $3, $4, $5, $6, $7::bytea, $8, $9, $10::int, $11::int,"
    f" {moment('$12::bigint')}, {moment('$13::bigint')})"
)
_OPEN = f" WHERE id = $1::uuid AND state = 'pending' AND (expires_at > {BEGUN} OR $2::bool)"
_ANSWER = (
    "UPDATE approvals SET state = $3, answered_by = $4, answered_at = clock_timestamp(), note = $5"
)
APPROVE = (
    f"{_ANSWER}{_OPEN} AND (four_eyes = 0 OR (first_by IS NOT NULL AND first_by <> $4))"
    f" RETURNING {COLUMNS}"
)
REJECT = f"{_ANSWER}{_OPEN} RETURNING {COLUMNS}, keep_rejected"
FIRST_YES = (
    f"UPDATE approvals SET first_by = $3, first_at = clock_timestamp(), note = $4{_OPEN}"
    f" AND four_eyes = 1 AND first_by IS NULL RETURNING {COLUMNS}"
)
OVERDUE = f"SELECT 1 FROM approvals WHERE state = 'pending' AND expires_at <= {NOW} LIMIT 1"
_EXPIRE = (
    "UPDATE approvals SET state = 'expired', answered_at = clock_timestamp() WHERE id IN (SELECT id"
    f" FROM approvals WHERE state = 'pending' AND expires_at <= {BEGUN} ORDER BY expires_at"
    f" LIMIT $1::int FOR UPDATE SKIP LOCKED) RETURNING {COLUMNS}, keep_rejected"
)
_APPROVED = (
    "SELECT a.tenant_id, a.message_id, a.id::text, a.rule, a.payload_sha256"
    " FROM unnest($2::text[], $3::text[]) u(tenant, message) JOIN approvals a"
    " ON a.tenant_id = u.tenant AND a.message_id = u.message AND a.subscription = $1"
    " WHERE a.state = 'approved'"
)


# ── asked ────────────────────────────────────────────────────────────────────────────────────────


def ask(tx: Tx, item: Finished, question: Question, now_us: int) -> Entry:
    """The question of a run that was just set aside for it."""
    run, message = item.run, item.run.message
    approval_id = text_id(uuid7_bytes())
    expires_us = now_us + int(question.expires_s * 1e6)
    tx.at_end(
        _ASK,
        approval_id,
        message.tenant_id,
        run.subscription,
        message.id,
        run.queue,
        message.type,
        question.payload_sha256,
        question.rule,
        storable(getattr(item.outcome, "reason", "")),
        str(int(question.four_eyes)),
        str(int(item.keep_rejected)),
        str(now_us),
        str(expires_us),
    )
    return asked(item, question, approval_id, expires_us)


async def approved_of(
    tx: Tx, subscription: str, tasks: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[Approved, ...]]:
    """What people said yes to, by (tenant, message)."""
    found: dict[tuple[str, str], tuple[Approved, ...]] = {}
    for tenant, message, approval_id, rule, digest in await tx.rows(
        _APPROVED,
        subscription,
        arrays.texts([tenant for tenant, _ in tasks]),
        arrays.texts([message for _, message in tasks]),
    ):
        yes = Approved(id=approval_id, rule=rule, payload_sha256=digest)
        found[(tenant, message)] = (*found.get((tenant, message), ()), yes)
    return found


# ── answered ─────────────────────────────────────────────────────────────────────────────────────


async def approve(tx: Tx, change: Change, approval_id: str, answer: Answering) -> Approval:
    """A yes; with four eyes the first of two. Raises NotFound or Conflict."""
    late = answer.expiry_us == 0
    name, note = uuid_text(approval_id), storable(answer.note)
    rows = await tx.rows(APPROVE, name, late, "approved", answer.by, note)
    if rows:
        approval = of_row(rows[0])
        change.entries.append(approved(approval, answer))
        await parked.resume(tx, change, identity_of(approval), by=answer.by)
        return approval
    rows = await tx.rows(FIRST_YES, name, late, answer.by, note)
    if not rows:
        raise await _why_not(tx, approval_id, answer)
    approval = of_row(rows[0])
    data = answer_data(approval, answer)
    change.entries.append((*identity_of(approval), events.APPROVAL_FIRST, data))
    return approval


async def reject(tx: Tx, change: Change, approval_id: str, answer: Answering) -> Approval:
    """A no: the message ends. Raises NotFound or Conflict."""
    late, note = answer.expiry_us == 0, storable(answer.note)
    rows = await tx.rows(REJECT, uuid_text(approval_id), late, "rejected", answer.by, note)
    if not rows:
        raise await _why_not(tx, approval_id, answer)
    *columns, keep = rows[0]
    approval = of_row(columns)
    data = answer_data(approval, answer)
    change.entries.append((*identity_of(approval), events.APPROVAL_REJECTED, data))
    why = f"{answer.by} said no" + (f": {answer.note}" if answer.note else "")
    await _deny(tx, change, approval, why, bool(keep), {"by": answer.by})
    return approval


async def expire(tx: Tx, change: Change) -> int:
    """Questions that nobody answered in time are a no; returns how many."""
    rows = await tx.rows(_EXPIRE, str(BATCH))
    for *columns, keep in rows:
        approval = of_row(columns)
        data = {"approval_id": approval.id, "rule": approval.rule}
        change.entries.append((*identity_of(approval), events.APPROVAL_EXPIRED, data))
        try:
            why = f"nobody answered by {moment_text(approval.expires_at_us)}"
            await _deny(tx, change, approval, why, bool(keep), {})
        except (NotFound, Conflict):
            continue  # the message ended otherwise: there is nothing left to deny
    return len(rows)


async def withdraw(tx: Tx, change: Change, task: Identity, *, by: str) -> None:
    """The message is discarded: nobody need answer any more."""
    note = "the message was discarded"
    found = await tx.rows(
        "UPDATE approvals SET state = 'rejected', answered_by = $4,"
        f" answered_at = clock_timestamp(), note = $5 WHERE {PK} AND state = 'pending'"
        " RETURNING id::text, rule",
        *task,
        by,
        note,
    )
    for approval_id, rule in found:
        data = {"approval_id": approval_id, "rule": rule, "by": by, "note": note}
        change.entries.append((*task, events.APPROVAL_REJECTED, data))


async def pending_of(tx: Tx, task: Identity) -> str | None:
    """The question that a parked message waits for."""
    found = await tx.rows(f"SELECT id::text FROM approvals WHERE {PK} AND state = 'pending'", *task)
    return found[0][0] if found else None


async def _deny(
    tx: Tx, change: Change, approval: Approval, why: str, keep: bool, data: dict[str, str]
) -> None:
    await parked.end(
        tx,
        change,
        identity_of(approval),
        Status.REJECTED,
        reason=why,
        data={"policies": [approval.rule], "approval_id": approval.id, **data},
        keep_letter=keep,
    )


async def _why_not(tx: Tx, approval_id: str, answer: Answering) -> Exception:
    rows = await tx.rows(
        f"SELECT {COLUMNS} FROM approvals WHERE id = $1::uuid", uuid_text(approval_id)
    )
    return why_not(of_row(rows[0]) if rows else None, approval_id, answer)


# ── looked at ────────────────────────────────────────────────────────────────────────────────────


async def listed(
    store: PostgresStore, where: ApprovalFilter, limit: int, after: str | None
) -> list[Approval]:
    """Oldest first."""
    found = await store.read(
        f"SELECT {COLUMNS} FROM approvals WHERE ($2::text IS NULL OR id > $2::uuid)"
        " AND ($3::text IS NULL OR state = $3) AND ($4::text IS NULL OR queue_name = $4)"
        " AND ($5::text IS NULL OR rule = $5) AND ($6::text IS NULL OR tenant_id = $6)"
        " ORDER BY id LIMIT $1::int",
        str(limit),
        after,
        where.state,
        where.queue,
        where.rule,
        where.tenant_id,
    )
    return [of_row(row) for row in found]
