"""Approvals: what a question says, and how its answers are told, in every dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.core import events
from holdfast.core.approvals import Approval, ApprovalState
from holdfast.core.clock import from_us
from holdfast.core.errors import Conflict, NotFound
from holdfast.core.events import Entry
from holdfast.core.outcome import Question
from holdfast.core.store import Finished
from holdfast.core.text import storable
from holdfast.store.seen import text_id

BATCH = 200
"""Questions that expire in one transaction."""


class Answering(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers, and when."""

    by: str
    note: str
    now_us: int
    expiry_us: int
    """What expires up to here is over; 0 while the clock is in doubt."""


def asked(item: Finished, question: Question, approval_id: str, expires_us: int) -> Entry:
    """The event of a question."""
    run, message = item.run, item.run.message
    data = {
        "approval_id": approval_id,
        "rule": question.rule,
        "reason": storable(getattr(item.outcome, "reason", "")),
        "payload_sha256": question.payload_sha256.hex(),
        "expires_at": expires_us,
        "four_eyes": question.four_eyes,
    }
    return message.tenant_id, run.subscription, message.id, events.APPROVAL_REQUESTED, data


def approved(approval: Approval, answer: Answering) -> Entry:
    """The event of a yes that lets the message run."""
    data = answer_data(approval, answer)
    if approval.first_by is not None:
        data["first_by"] = approval.first_by
    return (*identity_of(approval), events.APPROVAL_APPROVED, data)


def why_not(found: Approval | None, approval_id: str, answer: Answering) -> Exception:
    """Who was first, and with what."""
    if found is None:
        return NotFound(f"there is no approval {approval_id}")
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
    """What every answer's event holds."""
    return {
        "approval_id": approval.id,
        "rule": approval.rule,
        "by": answer.by,
        "note": storable(answer.note),
    }


def of_row(row: Sequence[Any]) -> Approval:
    """id, tenant_id, subscription, message_id, queue_name, event_name, payload_sha256, rule,
    reason, state, four_eyes, asked_at, expires_at, first_by, first_at, answered_by, answered_at,
    note"""
    blob, tenant, subscription, message, queue, type_, digest, rule, reason, state, *rest = row
    four_eyes, asked, expires, first_by, first_at, answered_by, answered_at, note = rest
    return Approval(
        id=text_id(blob),
        tenant_id=tenant,
        subscription=subscription,
        message_id=message,
        queue=queue,
        type=type_,
        payload_sha256=digest.hex(),
        rule=rule,
        reason=reason or "",
        state=state,
        four_eyes=bool(four_eyes),
        asked_at_us=asked,
        expires_at_us=expires,
        first_by=first_by,
        first_at_us=first_at,
        answered_by=answered_by,
        answered_at_us=answered_at,
        note=note or None,
    )


def identity_of(approval: Approval) -> tuple[str, str, str]:
    """Of the message that was asked about."""
    return approval.tenant_id, approval.subscription, approval.message_id


def moment_text(us: int) -> str:
    """For people."""
    return f"{from_us(us):%Y-%m-%d %H:%M:%S} UTC"
