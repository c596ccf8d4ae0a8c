"""`ackbone dlq`: dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .bodies import show_body, show_traceback
from .dead_letter_actions import discard, edit, filters, replay
from .output import Output, cut, plain, safe, when
from .parameters import one_id
from .root import Group, examples
from .session import Session, command_options

if TYPE_CHECKING:
    from ackbone.core.records import DeadLetter, LetterFilter


@click.group(cls=Group, epilog=examples("ackbone dlq list", "ackbone dlq replay ID"))
def dlq() -> None:
    """List dead letters; replay, edit or discard them.

    A dead letter is a message that ended without success, kept whole with its reason and history.
    """


@dlq.command(
    "list",
    epilog=examples(
        "ackbone dlq list --queue orders --since 1d",
        "ackbone dlq list --state all --json",
    ),
)
@filters
@click.option(
    "--state",
    type=click.Choice(["open", "replayed", "discarded", "all"]),
    default="open",
    show_default=True,
    help="Only dead letters in this state.",
)
@click.option("--cursor", help="Continue after this dead letter.")
@command_options
def list_(
    session: Session, where: LetterFilter, limit: int | None, state: str, cursor: str | None
) -> None:
    """List dead letters, newest first."""
    session.run(_list(session, where, limit or 50, state, cursor))


async def _list(
    session: Session, where: LetterFilter, limit: int, state: str, cursor: str | None
) -> None:
    from msgspec.structs import replace

    out = session.out
    where = replace(where, state=None if state == "all" else state)
    async with session.reading() as records:
        found = await records.letters(where, limit=limit + 1, before=cursor)
    shown = found[:limit]
    out.table(
        ("id", "queue", "type", "reason", "failures", "when (utc)", "state", "error"),
        [(_summary(each), _cells(each)) for each in shown],
        nothing="no dead letters" if cursor is None else "no more dead letters",
    )
    if len(found) > limit:
        out.say(f"more: add --cursor {shown[-1].id}")


def _summary(letter: DeadLetter) -> dict[str, Any]:
    found: dict[str, Any] = plain(letter)
    for name in ("body", "body_info", "intact", "history"):
        found.pop(name)
    return found


def _cells(letter: DeadLetter) -> Sequence[object]:
    return (
        letter.id, letter.queue, letter.type or "-", letter.reason, letter.retry_count,
        when(letter.failed_at_us), letter.state, cut(letter.error),
    )  # fmt: skip


@dlq.command(
    epilog=examples("ackbone dlq show 0199a1e1-ab12", "ackbone dlq show order-4711 --json")
)
@one_id
@command_options
def show(session: Session, name: str, tenant: str | None) -> None:
    """Show a dead letter with its failed attempts and its body.

    ID is the id of the dead letter or of its message, or the beginning of either.
    """
    session.run(_show(session, name, tenant))


async def _show(session: Session, name: str, tenant: str | None) -> None:
    from ackbone.admin.dead_letters import DeadLetters

    out = session.out
    async with session.reading() as records:
        letters = DeadLetters(records, codec_of=session.codec_of)
        letter = await letters.find(name, tenant_id=tenant)
        reading = letters.read(letter)
    out.data({**plain(letter), "message": reading.message, "problem": reading.problem})
    if out.as_json:
        return
    out.line(out.strong(f"dead letter {letter.id}"))
    settled = f", {when(letter.settled_at_us)}" if letter.settled_at_us else ""
    out.fields(
        ("message", letter.message_id),
        ("queue", letter.queue),
        ("type", letter.type or "-"),
        ("tenant", letter.tenant_id),
        ("reason", letter.reason),
        ("error", letter.error),
        ("failed", f"{when(letter.failed_at_us)} UTC"),
        ("state", f"{letter.state}{settled}"),
        ("replay", letter.replay_id),
    )
    show_history(out, letter.history)
    show_body(out, reading, letter.body)


def show_history(out: Output, history: Sequence[Any]) -> None:
    """Show the failed attempts, one line each, with their tracebacks."""
    if history:
        out.line("  history")
    shown = None
    for each in history:
        at = each.get("at")
        moment = when(at) if isinstance(at, int) else "-"
        crash = " (crash)" if each.get("crash") else ""
        out.line(
            f"    attempt {safe(each.get('attempt', '?'))}  {moment}{crash}  "
            f"{safe(each.get('error', ''))}"
        )
        trace = each.get("traceback")
        if trace and trace == shown:
            out.line("      (the same traceback)")
        else:
            show_traceback(out, each, "      ")
        shown = trace or shown


for each in (replay, edit, discard):
    dlq.add_command(each)
