"""Approvals: asked in finish's transaction, answered once, expired by a relay.

Every change of a row is a compare-and-set on `pending`, in the transaction that also moves the
task: one answer wins, and its message runs once or never.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.core import events
from holdfast.core.approvals import Approval, ApprovalFilter
from holdfast.core.errors import Conflict, NotFound
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
from holdfast.store.seen import HIGHEST, id_bytes, text_id

from . import parked
from .claiming import Claiming
from .ledger import Entry

_COLUMNS = (
    "id, tenant_id, subscription, message_id, queue_name, event_name, payload_sha256, rule, reason,"
    " state, four_eyes, asked_at, expires_at, first_by, first_at, answered_by, answered_at, note"
)
_ASK = (
    "INSERT INTO approvals (id, tenant_id, subscription, message_id, queue_name, event_name,"
    " payload_sha256, rule, reason, four_eyes, keep_rejected, asked_at, expires_at)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_OPEN = " WHERE id = ?1 AND state = 'pending' AND expires_at > ?2"
_ANSWER = "UPDATE approvals SET state = ?3, answered_by = ?4, answered_at = ?5, note = ?6"
APPROVE = (
    f"{_ANSWER}{_OPEN} AND (four_eyes = 0 OR (first_by IS NOT NULL AND first_by <> ?4))"
    f" RETURNING {_COLUMNS}"
)
REJECT = f"{_ANSWER}{_OPEN} RETURNING {_COLUMNS}"
FIRST_YES = (
    f"UPDATE approvals SET first_by = ?3, first_at = ?4, note = ?5{_OPEN} AND four_eyes = 1"
    f" AND first_by IS NULL RETURNING {_COLUMNS}"
)
OVERDUE = (
    "SELECT id FROM approvals WHERE state = 'pending' AND expires_at <= ? ORDER BY expires_at"
    " LIMIT ?"
)
APPROVED = (
    "SELECT a.tenant_id, a.message_id, a.id, a.rule, a.payload_sha256 FROM json_each(?1) j"
    " CROSS JOIN approvals a WHERE a.tenant_id = json_extract(j.value, '$[0]')"
    " AND a.message_id = json_extract(j.value, '$[1]') AND a.subscription = ?2"
    " AND a.state = 'approved'"
)


# ── asked ────────────────────────────────────────────────────────────────────────────────────────


def ask(conn: sqlite3.Connection, item: Finished, question: Question, now_us: int) -> Entry:
    """The question of a run that was just set aside for it."""
    run = item.run
    message = run.message
    approval_id = uuid7_bytes()
    expires_us = now_us + int(question.expires_s * 1e6)
    reason = storable(getattr(item.outcome, "reason", ""))
    conn.execute(
        _ASK,
        (
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
        ),
    )
    return asked(item, question, text_id(approval_id), expires_us)


def approved_of(
    claim: Claiming, tasks: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[Approved, ...]]:
    """What people said yes to, by (tenant, message)."""
    marks = msgspec.json.encode(tasks).decode()
    found: dict[tuple[str, str], tuple[Approved, ...]] = {}
    for tenant, message, blob, rule, digest in claim.conn.execute(
        APPROVED, (marks, claim.sub.name)
    ):
        yes = Approved(id=text_id(blob), rule=rule, payload_sha256=digest)
        found[(tenant, message)] = (*found.get((tenant, message), ()), yes)
    return found


# ── answered ─────────────────────────────────────────────────────────────────────────────────────


def approve(
    conn: sqlite3.Connection, approval_id: str, answer: Answering
) -> tuple[Approval, list[Entry]]:
    """A yes; with four eyes the first of two. Raises NotFound or Conflict."""
    blob = id_bytes(approval_id)
    values = (blob, answer.expiry_us, "approved", answer.by, answer.now_us, storable(answer.note))
    row = conn.execute(APPROVE, values).fetchone()
    if row is not None:
        approval = of_row(row)
        yes = approved(approval, answer)
        resumed = parked.resume(conn, identity_of(approval), by=answer.by, now_us=answer.now_us)
        return approval, [yes, resumed]
    half = (blob, answer.expiry_us, answer.by, answer.now_us, storable(answer.note))
    row = conn.execute(FIRST_YES, half).fetchone()
    if row is None:
        raise why_not(_found(conn, approval_id), approval_id, answer)
    approval = of_row(row)
    data = answer_data(approval, answer)
    return approval, [(*identity_of(approval), events.APPROVAL_FIRST, data)]


def reject(
    conn: sqlite3.Connection, approval_id: str, answer: Answering
) -> tuple[Approval, list[Entry]]:
    """A no: the message ends. Raises NotFound or Conflict."""
    values = (
        id_bytes(approval_id),
        answer.expiry_us,
        "rejected",
        answer.by,
        answer.now_us,
        storable(answer.note),
    )
    row = conn.execute(REJECT, values).fetchone()
    if row is None:
        raise why_not(_found(conn, approval_id), approval_id, answer)
    approval = of_row(row)
    no: Entry = (*identity_of(approval), events.APPROVAL_REJECTED, answer_data(approval, answer))
    why = f"{answer.by} said no" + (f": {answer.note}" if answer.note else "")
    return approval, [no, *_deny(conn, approval, why, {"by": answer.by}, answer.now_us)]


def expire(conn: sqlite3.Connection, now_us: int) -> list[Entry]:
    """Questions that nobody answered in time are a no; at most `BATCH` of them."""
    entries: list[Entry] = []
    for (blob,) in conn.execute(OVERDUE, (now_us, BATCH)).fetchall():
        row = conn.execute(
            "UPDATE approvals SET state = 'expired', answered_at = ? WHERE id = ?"
            f" AND state = 'pending' RETURNING {_COLUMNS}",
            (now_us, blob),
        ).fetchone()
        if row is None:
            continue
        approval = of_row(row)
        data = {"approval_id": approval.id, "rule": approval.rule}
        entries.append((*identity_of(approval), events.APPROVAL_EXPIRED, data))
        try:
            why = f"nobody answered by {moment_text(approval.expires_at_us)}"
            entries += _deny(conn, approval, why, {}, now_us)
        except (NotFound, Conflict):
            continue  # the message ended otherwise: there is nothing left to deny
    return entries


def withdraw(
    conn: sqlite3.Connection, task: parked.Identity, *, by: str, now_us: int
) -> list[Entry]:
    """The message is discarded: nobody need answer any more."""
    note = "the message was discarded"
    found = conn.execute(
        "UPDATE approvals SET state = 'rejected', answered_by = ?, answered_at = ?, note = ?"
        f"{parked.TASK} AND state = 'pending' RETURNING id, rule",
        (by, now_us, note, *task),
    ).fetchall()
    return [
        (
            *task,
            events.APPROVAL_REJECTED,
            {"approval_id": text_id(blob), "rule": rule, "by": by, "note": note},
        )
        for blob, rule in found
    ]


def pending_of(conn: sqlite3.Connection, task: parked.Identity) -> str | None:
    """The question that a parked message waits for."""
    found = conn.execute(
        f"SELECT id FROM approvals{parked.TASK} AND state = 'pending'", task
    ).fetchone()
    return None if found is None else text_id(found[0])


def _deny(
    conn: sqlite3.Connection, approval: Approval, why: str, data: dict[str, Any], now_us: int
) -> list[Entry]:
    (keep,) = conn.execute(
        "SELECT keep_rejected FROM approvals WHERE id = ?", (id_bytes(approval.id),)
    ).fetchone()
    return parked.end(
        conn,
        identity_of(approval),
        Status.REJECTED,
        reason=why,
        data={"policies": [approval.rule], "approval_id": approval.id, **data},
        keep_letter=bool(keep),
        now_us=now_us,
    )


def _found(conn: sqlite3.Connection, approval_id: str) -> Approval | None:
    row = conn.execute(
        f"SELECT {_COLUMNS} FROM approvals WHERE id = ?", (id_bytes(approval_id),)
    ).fetchone()
    return None if row is None else of_row(row)


# ── looked at ────────────────────────────────────────────────────────────────────────────────────


def listed(
    conn: sqlite3.Connection, where: ApprovalFilter, limit: int, after: str | None
) -> list[Approval]:
    """Oldest first."""
    found = conn.execute(
        f"SELECT {_COLUMNS} FROM approvals WHERE (?2 IS NULL OR id > ?2)"
        " AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR queue_name = ?4)"
        " AND (?5 IS NULL OR rule = ?5) AND (?6 IS NULL OR tenant_id = ?6)"
        " ORDER BY id LIMIT ?1",
        (
            limit,
            None if after is None else id_bytes(after),
            where.state,
            where.queue,
            where.rule,
            where.tenant_id,
        ),
    )
    return [of_row(row) for row in found]


def named(conn: sqlite3.Connection, name: str, tenant_id: str | None, limit: int) -> list[Approval]:
    """By approval id or message id; if none is called so, those whose id begins so."""
    head = f"SELECT {_COLUMNS} FROM approvals WHERE (?2 IS NULL OR tenant_id = ?2)"
    tail = " ORDER BY id DESC LIMIT ?3"
    exact = conn.execute(
        f"{head} AND (id = ?1 OR message_id = ?4){tail}", (id_bytes(name), tenant_id, limit, name)
    ).fetchall()
    if exact:
        return [of_row(row) for row in exact]
    digits = name.replace("-", "").upper()
    found = conn.execute(
        f"{head} AND (message_id BETWEEN ?1 AND ?4 OR hex(id) BETWEEN ?5 AND ?6){tail}",
        (name, tenant_id, limit, name + HIGHEST, digits, digits + "G"),
    )
    return [of_row(row) for row in found]
