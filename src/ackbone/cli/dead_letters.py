"""`ackbone dlq`: dead letters."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ackbone.admin.dead_letters import DeadLetters
from ackbone.core.records import DeadLetter, LetterFilter

from .bodies import show_body, show_history
from .dead_letter_actions import discard, edit, filters, replay
from .output import cut, plain, plain_without, when
from .parameters import any_of, filter_options, one_id
from .session import Session, command, group

_LEFT_OUT = ("body", "body_info", "intact", "history")


@group("ackbone dlq list", "ackbone dlq replay ID")
def dlq() -> None:
    """List dead letters; replay, edit or discard them.

    A dead letter is a message that ended without success, kept whole with its reason and history.
    """


@command(
    "ackbone dlq list --queue orders --since 1d",
    "ackbone dlq list --state all --json",
    of=dlq,
)
@filter_options(
    LetterFilter,
    *filters,
    any_of(
        ["open", "replayed", "discarded"], usual="open", help="Only dead letters in this state."
    ),
)
@click.option("--cursor", help="Continue after this dead letter.")
async def list_(
    session: Session, where: LetterFilter, limit: int | None, cursor: str | None
) -> None:
    """List dead letters, newest first."""
    out, limit = session.out, limit or 50
    async with session.reading() as records:
        found = await records.letters(where, limit=limit + 1, before=cursor)
    shown = found[:limit]
    out.table(
        ("id", "queue", "type", "reason", "failures", "when (utc)", "state", "error"),
        [(plain_without(each, *_LEFT_OUT), _cells(each)) for each in shown],
        nothing="no dead letters" if cursor is None else "no more dead letters",
    )
    if len(found) > limit:
        out.say(f"more: add --cursor {shown[-1].id}")


def _cells(letter: DeadLetter) -> Sequence[object]:
    return (
        letter.id, letter.queue, letter.type or "-", letter.reason, letter.retry_count,
        when(letter.failed_at_us), letter.state, cut(letter.error),
    )  # fmt: skip


@command("ackbone dlq show 0199a1e1-ab12", "ackbone dlq show order-4711 --json", of=dlq)
@one_id
async def show(session: Session, name: str, tenant: str | None) -> None:
    """Show a dead letter with its failed attempts and its body.

    ID is the id of the dead letter or the id of the message, or the beginning of either.
    """
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


for each in (replay, edit, discard):
    dlq.add_command(each)
