"""Parked messages, and the questions to people that some of them wait for.

A parked message is taken up again or ended by a compare-and-set on `parked`. An approval is asked
in finish's transaction, answered once, or expired by a relay. Every change of its row is a
compare-and-set on `pending`, in the transaction that also moves the task: one answer wins, and its
message runs once or never.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ackbone.core import events
from ackbone.core.approvals import Approval, ApprovalState
from ackbone.core.clock import from_us
from ackbone.core.errors import Conflict, NotFound
from ackbone.core.events import Entry
from ackbone.core.ids import uuid7_bytes
from ackbone.core.outcome import NO_HANDLER, Question, Status
from ackbone.core.store import Finished
from ackbone.core.text import storable

from .outcomes import TaskRow, bury
from .record_rows import fields_of, text_id, uuid_text
from .tasks import decode_history
from .unit import WORK, Change, Identity, Row, Tx


async def parked_kind(tx: Tx, identity: Identity) -> str | None:
    """Why it is parked; nobody else moves it now. Raises NotFound, or Conflict if it is not."""
    found = await tx.rows(tx.sql.operations.task_state, *identity)
    if not found:
        raise NotFound(f"there is no message {identity[2]}")
    status, kind = found[0]
    if status != Status.PARKED:
        raise Conflict(f"message {identity[2]} is not parked, it is {status}")
    return None if kind is None else str(kind)


async def resume(tx: Tx, change: Change, identity: Identity, *, by: str) -> None:
    """It is ready; no attempt is spent. Raises NotFound or Conflict."""
    kind = await parked_kind(tx, identity)
    await tx.send(tx.sql.operations.resume, *identity, await tx.moment())
    change.entries.append((*identity, events.RESUMED, {"kind": kind, "by": by}))
    change.topics.add(WORK)


async def resume_for_handler(
    tx: Tx, change: Change, kind: str, subscription: str, types: Sequence[str]
) -> int:
    """All that waited for a handler that is there now ("*": for any); returns how many."""
    asked = waits_for_handler(kind, subscription, types)
    found = await tx.rows(tx.sql.operations.handler_came, *asked, await tx.moment())
    return _resumed(change, found, {"kind": kind, "by": "handler"})


def waits_for_handler(kind: str, subscription: str, types: Sequence[str]) -> tuple[Any, ...]:
    """The parameters of `wait_for_handler`."""
    return kind, subscription, NO_HANDLER, "*" in types, list(types)


async def resume_for_effect(tx: Tx, change: Change) -> int:
    """All that waited for an effect whose result is recorded by now; returns how many."""
    found = await tx.rows(tx.sql.operations.effect_known, await tx.moment())
    return _resumed(change, found, {"kind": "effect_unknown", "by": "effect"})


def _resumed(change: Change, found: Sequence[Row], data: dict[str, str]) -> int:
    change.entries += [(*identity, events.RESUMED, data) for identity in found]
    if found:
        change.topics.add(WORK)
    return len(found)


async def end(
    tx: Tx,
    change: Change,
    identity: Identity,
    status: Status,
    *,
    reason: str,
    data: dict[str, Any],
    keep_letter: bool,
) -> None:
    """It is over; its key and its conversation are free. Raises NotFound or Conflict.

    `keep_letter`: it is kept as a dead letter, too, under the word of its status.
    """
    await parked_kind(tx, identity)
    now_us = await tx.moment()
    ((queue, type_, trace_id, key, lane, retries, history, body, info),) = await tx.rows(
        tx.sql.operations.parked_task, *identity
    )
    await tx.send(tx.sql.operations.end_parked, *identity, status.value, storable(reason), now_us)
    task = TaskRow(*identity, queue, type_, trace_id)
    change.entries.append(task.final(status, reason=storable(reason), **data))
    if keep_letter:
        letter = task.letter(
            status.value,
            reason,
            retry_count=retries or 0,
            history=decode_history(history),
            body=body,
            body_info=info,
        )
        change.entries.append(bury(tx, letter, now_us))
    task.let_go(tx, change, key, lane)
    change.topics.add(WORK)


BATCH = 200
"""Questions that expire in one transaction."""


class Answering(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: the person who gives it, the note and the time."""

    by: str
    note: str
    now_us: int
    expiry_us: int
    """Questions that expire up to this time are over; 0 while the clock is in doubt."""


# ── asked ────────────────────────────────────────────────────────────────────────────────────────


def ask(tx: Tx, item: Finished, question: Question, now_us: int) -> Entry:
    """Write the question of a run that was just parked for it; return its event."""
    run, message = item.run, item.run.message
    approval_id = str(uuid.UUID(bytes=uuid7_bytes()))
    expires_us = now_us + int(question.expires_s * 1e6)
    reason = storable(getattr(item.outcome, "reason", ""))
    tx.at_end(
        tx.sql.approvals.ask,
        approval_id,
        message.tenant_id,
        run.subscription,
        message.id,
        run.queue,
        message.type,
        question.payload_sha256,
        question.rule,
        reason,
        int(question.four_eyes),
        int(item.keep_rejected),
        now_us,
        expires_us,
    )
    data = {
        "approval_id": approval_id,
        "rule": question.rule,
        "reason": reason,
        "payload_sha256": question.payload_sha256.hex(),
        "expires_at": expires_us,
        "four_eyes": question.four_eyes,
    }
    return message.tenant_id, run.subscription, message.id, events.APPROVAL_REQUESTED, data


# ── answered ─────────────────────────────────────────────────────────────────────────────────────


async def approve(tx: Tx, change: Change, approval_id: str, answer: Answering) -> Approval:
    """Record a yes; with four eyes it is the first of two. Raises NotFound or Conflict."""
    values = _values(approval_id, answer)
    rows = await tx.rows(tx.sql.approvals.approve, *values)
    if rows:
        approval = of_row(rows[0])
        data = answer_data(approval, answer)
        if approval.first_by is not None:
            data["first_by"] = approval.first_by
        change.entries.append((*identity_of(approval), events.APPROVAL_APPROVED, data))
        await resume(tx, change, identity_of(approval), by=answer.by)
        return approval
    rows = await tx.rows(tx.sql.approvals.first_yes, *values)
    if not rows:
        raise await _why_not(tx, approval_id, answer)
    approval = of_row(rows[0])
    data = answer_data(approval, answer)
    change.entries.append((*identity_of(approval), events.APPROVAL_FIRST, data))
    return approval


async def reject(tx: Tx, change: Change, approval_id: str, answer: Answering) -> Approval:
    """Record a no and end the message. Raises NotFound or Conflict."""
    rows = await tx.rows(tx.sql.approvals.reject, *_values(approval_id, answer))
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
    """Reject questions that were not answered in time; return how many, at most `BATCH`."""
    rows = await tx.rows(tx.sql.approvals.expire, await tx.moment(), BATCH)
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
    """Withdraw the question of a message that is discarded."""
    note = "the message was discarded"
    found = await tx.rows(tx.sql.approvals.withdraw, *task, by, await tx.moment(), note)
    for blob, rule in found:
        data = {"approval_id": text_id(blob), "rule": rule, "by": by, "note": note}
        change.entries.append((*task, events.APPROVAL_REJECTED, data))


async def pending_of(tx: Tx, task: Identity) -> str | None:
    """Return the id of the question that a parked message waits for, if there is one."""
    found = await tx.rows(tx.sql.approvals.pending, *task)
    return text_id(found[0][0]) if found else None


async def _deny(
    tx: Tx, change: Change, approval: Approval, why: str, keep: bool, data: dict[str, str]
) -> None:
    await end(
        tx,
        change,
        identity_of(approval),
        Status.REJECTED,
        reason=why,
        data={"policies": [approval.rule], "approval_id": approval.id, **data},
        keep_letter=keep,
    )


def _values(approval_id: str, answer: Answering) -> tuple[str | int | None, ...]:
    note = storable(answer.note)
    return uuid_text(approval_id), answer.expiry_us, answer.by, answer.now_us, note


# ── words ────────────────────────────────────────────────────────────────────────────────────────


async def _why_not(tx: Tx, approval_id: str, answer: Answering) -> Exception:
    """Return the error that says why this answer does not count."""
    rows = await tx.rows(tx.sql.approvals.one, uuid_text(approval_id))
    if not rows:
        return NotFound(f"there is no approval {approval_id}")
    found = of_row(rows[0])
    if found.state == ApprovalState.PENDING and found.expires_at_us <= answer.expiry_us:
        when = moment_text(found.expires_at_us)
        return Conflict(f"approval {found.id} expired at {when}; no answer in time is a no")
    if found.state == ApprovalState.PENDING:
        return Conflict(
            f"{found.first_by} said yes to approval {found.id} before; it needs four eyes: "
            "a second, other person has to say yes, too"
        )
    when = "" if found.answered_at_us is None else f" at {moment_text(found.answered_at_us)}"
    who = "" if found.answered_by is None else f" by {found.answered_by}"
    note = f" ({found.note})" if found.note else ""
    return Conflict(f"approval {found.id} was {found.state}{who}{when}{note}; nothing was changed")


def answer_data(approval: Approval, answer: Answering) -> dict[str, Any]:
    """Return the fields that the event of every answer has."""
    return {
        "approval_id": approval.id,
        "rule": approval.rule,
        "by": answer.by,
        "note": storable(answer.note),
    }


def of_row(row: Sequence[Any]) -> Approval:
    """The columns of `Approval` in its order."""
    fields = fields_of(Approval, row)
    fields.update(
        id=text_id(fields["id"]),
        payload_sha256=fields["payload_sha256"].hex(),
        reason=fields["reason"] or "",
        four_eyes=bool(fields["four_eyes"]),
        note=fields["note"] or None,
    )
    return Approval(**fields)


def identity_of(approval: Approval) -> tuple[str, str, str]:
    """Return the identity of the message that the question is about."""
    return approval.tenant_id, approval.subscription, approval.message_id


def moment_text(us: int) -> str:
    """Return a time as text for people."""
    return f"{from_us(us):%Y-%m-%d %H:%M:%S} UTC"
