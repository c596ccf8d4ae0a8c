"""`ackbone approvals`: messages that wait for a person's approval."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click

from ackbone.admin.approvals import Approvals
from ackbone.core.approvals import Approval, ApprovalFilter

from .bodies import show_body
from .many import on_each, several
from .output import cut, plain, safe, span, when
from .parameters import any_of, filter_options, one_id, page_limit, some_ids
from .session import Session, command, group, operator_name


@group("ackbone approvals list", "ackbone approvals approve ID --by anna")
def approvals() -> None:
    """List messages that wait for approval; approve or reject them.

    A rule with `then: approve` parks its messages until a person answers. The first answer counts.
    No answer in time means no.
    """


@command(
    "ackbone approvals list",
    "ackbone approvals list --state all --queue orders --json",
    of=approvals,
)
@filter_options(
    ApprovalFilter,
    any_of(
        ["pending", "approved", "rejected", "expired"],
        usual="pending",
        help="Only approvals in this state.",
    ),
    click.option("--queue", help="Only this queue."),
    click.option("--rule", help="Only this rule."),
    click.option("--tenant", "tenant_id", help="Only this tenant."),
)
@page_limit
@click.option("--cursor", help="Continue after this approval.")
async def list_(session: Session, where: ApprovalFilter, limit: int, cursor: str | None) -> None:
    """List approvals, oldest first."""
    out = session.out
    async with session.reading() as records:
        found = await Approvals(records).list(where, limit=limit + 1, after=cursor)
    shown = found[:limit]
    out.table(
        ("id", "rule", "queue", "type", "tenant", "message", "asked (utc)", "state", "why"),
        [(plain(each), _cells(each)) for each in shown],
        nothing="no pending approvals" if where.state == "pending" else "no approvals",
    )
    if len(found) > limit:
        out.say(f"more: add --cursor {shown[-1].id}")


def _cells(approval: Approval) -> Sequence[object]:
    return (
        approval.id, approval.rule, approval.queue, approval.type or "-", approval.tenant_id,
        approval.message_id, when(approval.asked_at_us), _state(approval),
        cut(approval.reason),
    )  # fmt: skip


def _state(approval: Approval) -> str:
    if not approval.is_pending:
        return approval.state
    left = (approval.expires_at_us - time.time_ns() // 1000) / 1e6
    waits = f"{span(left)} left" if left > 0 else "expired"
    return f"1 of 2, {waits}" if approval.first_by else waits


@command(
    "ackbone approvals show 0199a1e1", "ackbone approvals show order-4711 --json", of=approvals
)
@one_id
async def show(session: Session, name: str, tenant: str | None) -> None:
    """Show an approval with its message.

    ID is the id of the approval or the id of the message, or the beginning of either.
    """
    out = session.out
    async with session.reading() as records:
        use = Approvals(records, codec_of=session.codec_of)
        found = await use.find(name, tenant_id=tenant)
        task, reading = await use.message(found)
    out.data({**plain(found), "status": None if task is None else task.status,
              "message": reading.message, "problem": reading.problem})  # fmt: skip
    if out.as_json:
        return
    out.line(out.strong(f"approval {safe(found.id)}"))
    answered = None if found.answered_at_us is None else f"{when(found.answered_at_us)} UTC"
    first = f"{found.first_by}, {when(found.first_at_us)} UTC" if found.first_by else None
    out.fields(
        ("rule", found.rule),
        ("why", found.reason or None),
        ("state", _state(found)),
        ("message", found.message_id),
        ("queue", found.queue),
        ("type", found.type or "-"),
        ("tenant", found.tenant_id),
        ("asked", f"{when(found.asked_at_us)} UTC"),
        ("expires", f"{when(found.expires_at_us)} UTC"),
        ("eyes", "four: two people must approve" if found.four_eyes else None),
        ("first", first),
        ("by", found.answered_by),
        ("answered", answered),
        ("note", found.note),
        ("sha256", found.payload_sha256),
    )
    show_body(out, reading, None if task is None else task.body)


@command(
    "ackbone approvals approve 0199a1e1 --by anna",
    "ackbone approvals approve 0199a1e1 0199a1e2 --note 'checked the invoices' --yes",
    of=approvals,
)
@some_ids
@click.option("--by", help="Who answers (default: you).")
@click.option("--note", default="", help="A note for the ledger.")
@several("Approve")
async def approve(session: Session, **options: Any) -> None:
    """Let messages run. The first answer counts (exit code 5 if there was one before)."""
    await _answer(session, Approvals.approve, **options)


@command(
    "ackbone approvals reject 0199a1e1 --by anna --note 'wrong account'",
    "ackbone approvals reject 0199a1e1 0199a1e2 --yes",
    of=approvals,
)
@some_ids
@click.option("--by", help="Who answers (default: you).")
@click.option("--note", default="", help="Your reason, for the ledger.")
@several("Reject")
async def reject(session: Session, **options: Any) -> None:
    """End messages as rejected. The first answer counts (exit code 5 if there was one before)."""
    await _answer(session, Approvals.reject, **options)


async def _answer(
    session: Session,
    answer: Callable[..., Awaitable[Approval]],
    *,
    names: Sequence[str],
    by: str | None,
    note: str,
    tenant: str | None,
) -> None:
    by = by or operator_name()
    async with session.acting() as (_, records, operations):
        use = Approvals(records, operations, codec_of=session.codec_of)

        async def act(name: str) -> tuple[object, str]:
            found = await use.find(name, tenant_id=tenant)
            found = await answer(use, found, by=by, note=note)
            waits = "; a second person must approve, too" if found.is_pending else ""
            state = "approved once" if found.is_pending else found.state
            return found, f"{safe(found.message_id)} {state}{waits}"

        await on_each(session, names, act)
