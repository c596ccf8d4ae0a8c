"""`ackbone approvals`: messages that wait for a person's approval."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .bodies import show_body
from .many import confirm, on_each
from .output import cut, plain, safe, span, when
from .parameters import one_id, page_limit
from .root import Group, examples
from .session import Session, command_options, operator_name

if TYPE_CHECKING:
    from ackbone.core.approvals import Approval

STATES = ("pending", "approved", "rejected", "expired", "all")


@click.group(
    cls=Group,
    epilog=examples("ackbone approvals list", "ackbone approvals approve ID --by anna"),
)
def approvals() -> None:
    """List messages that wait for approval; approve or reject them.

    A rule with `then: approve` parks its messages until a person answers. The first answer counts.
    No answer in time means no.
    """


@approvals.command(
    "list",
    epilog=examples(
        "ackbone approvals list", "ackbone approvals list --state all --queue orders --json"
    ),
)
@click.option("--state", type=click.Choice(STATES), default="pending", show_default=True,
              help="Only approvals in this state.")  # fmt: skip
@click.option("--queue", help="Only this queue.")
@click.option("--rule", help="Only this rule.")
@click.option("--tenant", help="Only this tenant.")
@page_limit
@click.option("--cursor", help="Continue after this approval.")
@command_options
def list_(session: Session, **options: Any) -> None:
    """List approvals, oldest first."""
    session.run(_list(session, options))


async def _list(session: Session, options: dict[str, Any]) -> None:
    from ackbone.admin.approvals import Approvals
    from ackbone.core.approvals import ApprovalFilter

    out, limit = session.out, options["limit"]
    state = options["state"]
    where = ApprovalFilter(
        state=None if state == "all" else state,
        queue=options["queue"],
        rule=options["rule"],
        tenant_id=options["tenant"],
    )
    async with session.reading() as records:
        use = Approvals(records)
        found = await use.list(where, limit=limit + 1, after=options["cursor"])
    shown = found[:limit]
    out.table(
        ("id", "rule", "queue", "type", "tenant", "message", "asked (utc)", "state", "why"),
        [(plain(each), _cells(each)) for each in shown],
        nothing="no pending approvals" if state == "pending" else "no approvals",
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


@approvals.command(
    epilog=examples("ackbone approvals show 0199a1e1", "ackbone approvals show order-4711 --json")
)
@one_id
@command_options
def show(session: Session, name: str, tenant: str | None) -> None:
    """Show an approval with its message.

    ID is the id of the approval or of its message, or the beginning of either.
    """
    session.run(_show(session, name, tenant))


async def _show(session: Session, name: str, tenant: str | None) -> None:
    from ackbone.admin.approvals import Approvals

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


@approvals.command(
    epilog=examples(
        "ackbone approvals approve 0199a1e1 --by anna",
        "ackbone approvals approve 0199a1e1 0199a1e2 --note 'checked the invoices' --yes",
    )
)
@click.argument("names", metavar="ID...", nargs=-1, required=True)
@click.option("--by", help="Who answers (default: you).")
@click.option("--note", default="", help="A note for the ledger.")
@click.option("--tenant", help="Look only at this tenant.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation, even for several.")
@command_options
def approve(session: Session, names: Sequence[str], yes: bool, **options: Any) -> None:
    """Let messages run. The first answer counts (exit code 5 if there was one before)."""
    if len(names) > 1 and not yes:
        confirm(f"Approve {len(names)} messages?")
    session.run(_answer(session, names, "approve", options))


@approvals.command(
    epilog=examples(
        "ackbone approvals reject 0199a1e1 --by anna --note 'wrong account'",
        "ackbone approvals reject 0199a1e1 0199a1e2 --yes",
    )
)
@click.argument("names", metavar="ID...", nargs=-1, required=True)
@click.option("--by", help="Who answers (default: you).")
@click.option("--note", default="", help="Your reason, for the ledger.")
@click.option("--tenant", help="Look only at this tenant.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation, even for several.")
@command_options
def reject(session: Session, names: Sequence[str], yes: bool, **options: Any) -> None:
    """End messages as rejected. The first answer counts (exit code 5 if there was one before)."""
    if len(names) > 1 and not yes:
        confirm(f"Reject {len(names)} messages?")
    session.run(_answer(session, names, "reject", options))


async def _answer(
    session: Session, names: Sequence[str], word: str, options: dict[str, Any]
) -> None:
    from ackbone.admin.approvals import Approvals

    by = options["by"] or operator_name()
    async with session.acting() as (_, records, operations):
        use = Approvals(records, operations, codec_of=session.codec_of)
        say = use.approve if word == "approve" else use.reject

        async def act(name: str) -> tuple[object, str]:
            found = await use.find(name, tenant_id=options["tenant"])
            found = await say(found, by=by, note=options["note"])
            waits = "; a second person must approve, too" if found.is_pending else ""
            state = "approved once" if found.is_pending else found.state
            return found, f"{safe(found.message_id)} {state}{waits}"

        await on_each(session, names, act)
