"""`ackbone dlq replay`, `edit` and `discard`, and the program `dlq_replay` (replay and discard)."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import click
import msgspec

from ackbone.admin.causes import Cause, Handled, by_cause
from ackbone.admin.dead_letters import DeadLetters, Edits
from ackbone.core.codecs.values import loads
from ackbone.core.errors import Conflict
from ackbone.core.records import DeadLetter, LetterFilter

from .many import Ended, Words, on_many, refuse_unclear
from .output import Output, cut, dump, iso, plain, safe
from .parameters import (
    ASSIGNMENT,
    HEADER,
    JSON,
    MOMENT,
    PLACE,
    RATE,
    filter_options,
    in_tenant,
    together,
    yes,
)
from .session import Exit, Session, command, encoder, stop

_REPLAY, _DISCARD = "would be replayed", "would be discarded"
_FILTERS = "--queue, --type, --reason, --error, --since, --before"
"""The options of `filters` that select dead letters, for the usage error."""
filters = (
    click.option("--queue", help="Only this queue."),
    click.option("--type", help="Only this message type."),
    click.option("--reason", help="Only this reason: retries_exhausted, undecodable, …"),
    click.option("--error", help="Only errors that contain this text."),
    click.option("--tenant", "tenant_id", help="Only this tenant."),
    click.option(
        "--since",
        "since_us",
        type=MOMENT,
        help="Only since this time: 15m, 2d (ago) or 2025-11-20T10:00.",
    ),
    click.option(
        "--before",
        "before_us",
        type=MOMENT,
        help="Only before this time, in the same format.",
    ),
    click.option("--limit", type=click.IntRange(1), help="At most this many."),
)
changes = together(
    click.option(
        "--set",
        "put",
        type=ASSIGNMENT,
        multiple=True,
        metavar="PATH=VALUE",
        help="Set payload.FIELD, headers.NAME, type or idempotency_key; JSON or text; "
        "may be repeated.",
    ),
    click.option(
        "--unset",
        "taken",
        type=PLACE,
        multiple=True,
        metavar="PATH",
        help="Remove a field; may be repeated.",
    ),
)
replay_options = together(
    click.argument("names", metavar="[ID]...", nargs=-1),
    filter_options(LetterFilter, *filters),
    click.option("--all", "every", is_flag=True, help="All open dead letters."),
    changes,
    click.option(
        "--skip-unfit",
        is_flag=True,
        help="Skip dead letters that the change does not fit, instead of sending nothing.",
    ),
    click.option("--rate", type=RATE, help="Send at most this many: 5/s, 90/m or 1000/h."),
    click.option("--to-queue", help="Send to this queue instead of the original one."),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Show what would be sent, grouped by cause, and send nothing.",
    ),
)
"""The arguments and options that `ackbone dlq replay` and `dlq_replay` share."""


@command(
    "ackbone dlq replay 0199a1e1-ab12 0199a1e1-ab34",
    "ackbone dlq replay --queue orders --reason retries_exhausted --rate 5/s",
    "ackbone dlq replay --error 'unknown currency' --set payload.currency=EUR",
    "ackbone dlq replay --all --dry-run",
)
@replay_options
async def replay(
    session: Session, names: Sequence[str], where: LetterFilter, **options: Any
) -> None:
    """Send dead letters again, as new messages.

    Each new message has a new id and names the old one (metadata.replay_of). Give ids, or choose
    by options; --all replays all open dead letters. Changes (--set, --unset) are tried on all of
    them before the first one is sent. Ctrl+C stops between two messages and prints how many are
    left.
    """
    await _replay(session, names, where, options)


async def _replay(
    session: Session, names: Sequence[str], where: LetterFilter, options: dict[str, Any]
) -> None:
    refuse_unclear(names, where, options["every"], options=_FILTERS)
    edits = Edits(changes=(*options["put"], *options["taken"]), queue=options["to_queue"])
    async with session.acting() as (app, records, operations):
        letters = DeadLetters(records, operations, encode=encoder(app), codec_of=session.codec_of)
        ids = await _choose(letters, names, where, options["limit"])
        if edits.changed and not options["skip_unfit"] and not options["dry_run"]:
            await _refuse_unfit(session, letters, ids, edits)
        await _send_again(session, letters, ids, edits, options)


async def _send_again(
    session: Session,
    letters: DeadLetters,
    ids: Sequence[str],
    edits: Edits,
    options: dict[str, Any],
) -> None:
    await on_many(
        session,
        ids,
        lambda asked: letters.replay(ids, rate=options.get("rate"), edits=edits, stop=asked),
        ended=_ended,
        words=_words("replayed"),
        preview=lambda: _preview(
            session,
            letters.replay(ids, edits=edits, dry_run=True),
            _REPLAY,
            edited=bool(edits.changed),
        ),
        dry_run=options["dry_run"],
    )


def _words(done: str) -> Words:
    now = iso(time.time_ns() // 1000)
    return Words(
        done,
        "no dead letter matches",
        f". To continue, repeat the command with --before {now}: nothing is done twice, and "
        "messages that failed since then are left out",
    )


def _ended(handled: Handled) -> Ended:
    letter, new_id = handled.letter, handled.replay_id
    record = {
        "id": letter.id,
        "message_id": letter.message_id,
        "queue": letter.queue,
        "replay_id": new_id,
    }
    return Ended(letter.id, record, handled.error, f" as {new_id}" if new_id else "")


async def _preview(
    session: Session, handled: AsyncIterator[Handled], word: str, *, edited: bool = False
) -> None:
    causes = by_cause([each async for each in handled])
    _show_causes(session.out, causes, word, edited=edited)


async def _choose(
    letters: DeadLetters, names: Sequence[str], where: LetterFilter, limit: int | None
) -> list[str]:
    """Return the ids of the chosen dead letters."""
    if not names:
        return await letters.chosen(where, limit=limit)
    found = [await letters.find(name, tenant_id=where.tenant_id) for name in names]
    return await letters.chosen(found)


async def _refuse_unfit(
    session: Session, letters: DeadLetters, ids: Sequence[str], edits: Edits
) -> None:
    """End the command if the changes do not fit every open dead letter.

    Another operator may have replayed some meanwhile. Those are reported one by one later.
    """
    tried = letters.replay(ids, edits=edits, dry_run=True)
    causes = by_cause([each async for each in tried if each.letter.state == "open"])
    unfit = [cause for cause in causes if cause.problem is not None]
    if not unfit:
        return
    _show_causes(session.out, causes, _REPLAY, edited=True)
    count = sum(cause.count for cause in unfit)
    session.out.say(
        f"ackbone: the change does not fit {count} of {len(ids)} dead letters; nothing was sent. "
        "Choose fewer, or skip these with --skip-unfit"
    )
    stop(Exit.CONFLICT)


def _show_causes(out: Output, causes: list[Cause], word: str, *, edited: bool = False) -> None:
    """Show what would happen, by cause; with `edited`, an example of the changed payload, too."""
    if not causes:
        out.say("no dead letter matches")
        return
    out.table(
        ("count", "queue", "type", "reason", "error", "example", "what"),
        [_cause_row(cause, word) for cause in causes],
    )
    for cause in causes:
        if edited and cause.message is not None:
            shown = dump(cause.message.payload)
            out.line(f"  {cause.examples[0]} as {safe(cause.message.type)} {shown}")
    good = sum(cause.count for cause in causes if cause.problem is None)
    bad = sum(cause.count for cause in causes if cause.problem is not None)
    out.say(f"{good} {word}{f', {bad} cannot' if bad else ''}; nothing was changed")


def _cause_row(cause: Cause, word: str) -> tuple[dict[str, Any], Sequence[object]]:
    record: dict[str, Any] = plain(cause)
    message = record.pop("message")
    record["payload"] = None if message is None else message["payload"]
    record["what"] = word if cause.problem is None else "cannot"
    return record, (
        cause.count, cause.queue, cause.type or "-", cause.reason, cut(cause.error),
        cause.examples[0], word if cause.problem is None else f"cannot: {cause.problem}",
    )  # fmt: skip


@command(
    "ackbone dlq edit 0199a1e1-ab12 --payload '{\"amount\": 12}'",
    "ackbone dlq edit 0199a1e1-ab12 --set payload.amount=12 --unset payload.total",
    "ackbone dlq edit 0199a1e1-ab12          # opens your $EDITOR",
)
@click.argument("name", metavar="ID")
@click.option("--payload", type=JSON, help="The new payload as JSON; '-' reads standard input.")
@click.option("--type", help="The new message type.")
@click.option("--header", type=HEADER, multiple=True, help="NAME=VALUE to set; may be repeated.")
@changes
@click.option("--to-queue", help="Send to this queue instead of the original one.")
@in_tenant
@click.option("--dry-run", is_flag=True, help="Show what would be sent and send nothing.")
async def edit(session: Session, name: str, **options: Any) -> None:
    """Send a dead letter again with changes.

    The dead letter keeps its content; a new message is sent in its place.
    """
    async with session.acting() as (app, records, operations):
        letters = DeadLetters(records, operations, encode=encoder(app), codec_of=session.codec_of)
        letter = await letters.find(name, tenant_id=options["tenant"])
        await _send_again(session, letters, [letter.id], _edits(letters, letter, options), options)


def _edits(letters: DeadLetters, letter: DeadLetter, options: dict[str, Any]) -> Edits:
    changes = (*options["put"], *options["taken"])
    payload: Any = msgspec.UNSET if options["payload"] is None else options["payload"]
    if payload is msgspec.UNSET and not (options["type"] or options["header"] or changes):
        if not sys.stdin.isatty():
            raise click.UsageError("Give a change: --payload, --set, --type or --header.")
        payload = _in_editor(letters, letter)
    return Edits(
        payload=payload,
        type=options["type"],
        headers=dict(options["header"]),
        changes=changes,
        queue=options["to_queue"],
    )


def _in_editor(letters: DeadLetters, letter: DeadLetter) -> Any:
    message = letters.read(letter).message
    before = dump(message.payload if message is not None else None, indent=2)
    after = click.edit(before + "\n", extension=".json")
    if after is None or after.strip() == before.strip():
        raise Conflict("nothing was changed and nothing was sent")
    return loads(after.encode())


@command(
    "ackbone dlq discard 0199a1e1-ab12 --why 'test data'",
    "ackbone dlq discard --queue orders --reason undecodable --yes",
)
@click.argument("names", metavar="[ID]...", nargs=-1)
@filter_options(LetterFilter, *filters)
@click.option("--all", "every", is_flag=True, help="All open dead letters.")
@click.option("--why", default="", help="Your reason, for the ledger.")
@click.option("--dry-run", is_flag=True, help="Show what would be discarded, grouped by cause.")
@yes
async def discard(
    session: Session, names: Sequence[str], where: LetterFilter, **options: Any
) -> None:
    """Close dead letters without sending them again.

    A discarded dead letter is kept and can no longer be replayed.
    """
    await _discard(session, names, where, options)


async def _discard(
    session: Session, names: Sequence[str], where: LetterFilter, options: dict[str, Any]
) -> None:
    refuse_unclear(names, where, options["every"], options=_FILTERS)
    async with session.acting() as (_, records, operations):
        letters = DeadLetters(records, operations, codec_of=session.codec_of)
        ids = await _choose(letters, names, where, options["limit"])
        await on_many(
            session,
            ids,
            lambda asked: letters.discard(ids, reason=options["why"], stop=asked),
            ended=_ended,
            words=_words("discarded"),
            preview=lambda: _preview(
                session, letters.discard(ids, reason="", dry_run=True), _DISCARD
            ),
            dry_run=options["dry_run"],
            question=None if names or options["yes"] else f"Discard {len(ids)} dead letters?",
        )


@command(
    "dlq_replay --error 'unknown currency' --set payload.currency=EUR --dry-run",
    "dlq_replay --queue stream:task --rate 5/s",
    "dlq_replay 0199a1e1-ab12 --abandon --why 'test data'",
)
@replay_options
@click.option("--abandon", is_flag=True, help="Send nothing; discard them.")
@click.option("--why", default="", help="With --abandon: your reason, for the ledger.")
@click.option("-y", "--yes", is_flag=True, help="With --abandon: do not ask for confirmation.")
async def dlq_replay(
    session: Session, names: Sequence[str], where: LetterFilter, **options: Any
) -> None:
    """Send dead letters again, with changes if needed, or discard them.

    The same as `ackbone dlq replay`; with --abandon the same as `ackbone dlq discard`.
    """
    sending = ("put", "taken", "skip_unfit", "rate", "to_queue")
    if options["abandon"] and any(options[name] for name in sending):
        raise click.UsageError(
            "--abandon sends nothing: leave out --set, --unset, --rate and the like."
        )
    act = _discard if options["abandon"] else _replay
    await act(session, names, where, options)


def program() -> None:
    """The console script `dlq_replay`."""
    from .root import CONTEXT

    dlq_replay.context_settings = CONTEXT
    sys.exit(dlq_replay.main(prog_name="dlq_replay"))
