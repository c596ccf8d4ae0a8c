"""`ackbone dlq replay`, `edit` and `discard`; `dlq_replay`, which is the first and the last."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ackbone.core.errors import Conflict

from .causes import show_causes
from .choosing import OPTIONS, choose, filters
from .examples import examples
from .many import Ended, Words, on_many, refuse_unclear
from .output import dump, iso
from .parameters import Assignment, Header, Json, Place, Rate
from .session import Exit, Session, command_options, encoder, stop

if TYPE_CHECKING:
    from ackbone.admin.causes import Cause, Handled
    from ackbone.admin.dead_letters import DeadLetters, Edits
    from ackbone.core.records import DeadLetter, LetterFilter

Fn = TypeVar("Fn", bound=Callable[..., Any])
_REPLAY, _DISCARD = "would be replayed", "would be discarded"


def repairs(fn: Fn) -> Fn:
    """--set and --unset."""
    unset = click.option(
        "--unset",
        "taken",
        type=Place(),
        multiple=True,
        metavar="PATH",
        help="Take a field away; may be repeated.",
    )
    set_ = click.option(
        "--set",
        "put",
        type=Assignment(),
        multiple=True,
        metavar="PATH=VALUE",
        help="Set payload.FIELD, headers.NAME, type or idempotency_key; JSON or text; "
        "may be repeated.",
    )
    return set_(unset(fn))


def replay_options(fn: Fn) -> Fn:
    """What `ackbone dlq replay` and `dlq_replay` take."""
    options = (
        click.argument("names", metavar="[ID]...", nargs=-1),
        filters,
        click.option("--all", "every", is_flag=True, help="All that are open."),
        repairs,
        click.option(
            "--skip-unfit",
            is_flag=True,
            help="Leave out what the repair does not fit, instead of sending nothing.",
        ),
        click.option("--rate", type=Rate(), help="At most so many: 5/s, 90/m or 1000/h."),
        click.option("--to-queue", help="Send them to this queue instead of their own."),
        click.option(
            "--dry-run", is_flag=True, help="Show what would happen, by cause, and send nothing."
        ),
    )
    for option in reversed(options):
        fn = option(fn)
    return fn


@click.command(
    epilog=examples(
        "ackbone dlq replay 0199a1e1-ab12 0199a1e1-ab34",
        "ackbone dlq replay --queue orders --reason retries_exhausted --rate 5/s",
        "ackbone dlq replay --error 'unknown currency' --set payload.currency=EUR",
        "ackbone dlq replay --all --dry-run",
    )
)
@replay_options
@command_options
def replay(session: Session, names: Sequence[str], where: LetterFilter, **options: Any) -> None:
    """Send dead letters again, as new messages.

    Each new message has an id of its own and names the old one (metadata.replay_of). Name letters,
    or choose by options; --all takes all that are open. A repair is tried on all of them before
    the first one is sent. Ctrl+C stops between two letters and says what is left.
    """
    refuse_unclear(names, where, options["every"], options=OPTIONS)
    session.run(_replay(session, names, where, options))


async def _replay(
    session: Session, names: Sequence[str], where: LetterFilter, options: dict[str, Any]
) -> None:
    from ackbone.admin.dead_letters import DeadLetters, Edits

    edits = Edits(changes=(*options["put"], *options["taken"]), queue=options["to_queue"])
    async with session.acting() as (app, records, operations):
        letters = DeadLetters(records, operations, encode=encoder(app), codec_of=session.codec_of)
        ids = await choose(letters, names, where, options["limit"])
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
        "no dead letter fits",
        f". To go on, repeat the command with --before {now}: nothing is done twice, and what "
        "failed anew meanwhile stays out",
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
    show_causes(session.out, await _causes(handled), word, edited=edited)


async def _causes(handled: AsyncIterator[Handled]) -> list[Cause]:
    from ackbone.admin.causes import by_cause

    return by_cause([each async for each in handled])


async def _refuse_unfit(
    session: Session, letters: DeadLetters, ids: Sequence[str], edits: Edits
) -> None:
    """A repair that does not fit every letter is not begun."""
    causes = await _causes(letters.replay(ids, edits=edits, dry_run=True))
    unfit = [cause for cause in causes if cause.problem is not None]
    if not unfit:
        return
    show_causes(session.out, causes, _REPLAY, edited=True)
    count = sum(cause.count for cause in unfit)
    session.out.say(
        f"ackbone: the repair does not fit {count} of {len(ids)} letters; nothing was sent. "
        "Choose more narrowly, or leave them out with --skip-unfit"
    )
    stop(Exit.CONFLICT)


@click.command(
    epilog=examples(
        "ackbone dlq edit 0199a1e1-ab12 --payload '{\"amount\": 12}'",
        "ackbone dlq edit 0199a1e1-ab12 --set payload.amount=12 --unset payload.total",
        "ackbone dlq edit 0199a1e1-ab12          # opens your $EDITOR",
    )
)
@click.argument("name", metavar="ID")
@click.option("--payload", type=Json(), help="The new payload as JSON; '-' reads standard input.")
@click.option("--type", "type_", help="The new message type.")
@click.option("--header", type=Header(), multiple=True, help="NAME=VALUE to set; may be repeated.")
@repairs
@click.option("--to-queue", help="Send it to this queue instead of its own.")
@click.option("--tenant", help="Look at this tenant only.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@command_options
def edit(session: Session, name: str, **options: Any) -> None:
    """Send a dead letter again with a changed payload.

    The dead letter stays as it was; a new message is sent in its place.
    """
    session.run(_edit(session, name, options))


async def _edit(session: Session, name: str, options: dict[str, Any]) -> None:
    from ackbone.admin.dead_letters import DeadLetters

    async with session.acting() as (app, records, operations):
        letters = DeadLetters(records, operations, encode=encoder(app), codec_of=session.codec_of)
        letter = await letters.find(name, tenant_id=options["tenant"])
        await _send_again(session, letters, [letter.id], _edits(letters, letter, options), options)


def _edits(letters: DeadLetters, letter: DeadLetter, options: dict[str, Any]) -> Edits:
    import msgspec

    from ackbone.admin.dead_letters import Edits

    changes = (*options["put"], *options["taken"])
    payload: Any = msgspec.UNSET if options["payload"] is None else options["payload"]
    if payload is msgspec.UNSET and not (options["type_"] or options["header"] or changes):
        if not sys.stdin.isatty():
            raise click.UsageError("Say what to change: --payload, --set, --type or --header.")
        payload = _in_editor(letters, letter)
    return Edits(
        payload=payload,
        type=options["type_"],
        headers=dict(options["header"]),
        changes=changes,
        queue=options["to_queue"],
    )


def _in_editor(letters: DeadLetters, letter: DeadLetter) -> Any:
    from ackbone.core.json_text import loads

    message = letters.read(letter).message
    before = dump(message.payload if message is not None else None, indent=2)
    after = click.edit(before + "\n", extension=".json")
    if after is None or after.strip() == before.strip():
        raise Conflict("nothing was changed, nothing was sent")
    return loads(after.encode())


@click.command(
    epilog=examples(
        "ackbone dlq discard 0199a1e1-ab12 --why 'test data'",
        "ackbone dlq discard --queue orders --reason undecodable --yes",
    )
)
@click.argument("names", metavar="[ID]...", nargs=-1)
@filters
@click.option("--all", "every", is_flag=True, help="All that are open.")
@click.option("--why", default="", help="Your reason, for the ledger.")
@click.option("--dry-run", is_flag=True, help="Show what would be discarded, by cause.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@command_options
def discard(session: Session, names: Sequence[str], where: LetterFilter, **options: Any) -> None:
    """Settle dead letters without sending them again.

    A discarded letter is kept, and cannot be replayed any more.
    """
    refuse_unclear(names, where, options["every"], options=OPTIONS)
    session.run(_discard(session, names, where, options))


async def _discard(
    session: Session, names: Sequence[str], where: LetterFilter, options: dict[str, Any]
) -> None:
    from ackbone.admin.dead_letters import DeadLetters

    async with session.acting() as (_, records, operations):
        letters = DeadLetters(records, operations, codec_of=session.codec_of)
        ids = await choose(letters, names, where, options["limit"])
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


@click.command(
    "dlq_replay",
    epilog=examples(
        "dlq_replay --error 'unknown currency' --set payload.currency=EUR --dry-run",
        "dlq_replay --queue stream:task --rate 5/s",
        "dlq_replay 0199a1e1-ab12 --abandon --why 'test data'",
    ),
)
@replay_options
@click.option("--abandon", is_flag=True, help="Send nothing: mark them as given up.")
@click.option("--why", default="", help="With --abandon: your reason, for the ledger.")
@click.option("-y", "--yes", is_flag=True, help="With --abandon: do not ask.")
@command_options
def dlq_replay(session: Session, names: Sequence[str], where: LetterFilter, **options: Any) -> None:
    """Send dead letters again, mended if need be, or give them up.

    The same as `ackbone dlq replay`; with --abandon the same as `ackbone dlq discard`.
    """
    refuse_unclear(names, where, options["every"], options=OPTIONS)
    sending = ("put", "taken", "skip_unfit", "rate", "to_queue")
    if options["abandon"] and any(options[name] for name in sending):
        raise click.UsageError("What is abandoned is not sent: --abandon goes alone.")
    act = _discard if options["abandon"] else _replay
    session.run(act(session, names, where, options))


def program() -> None:
    """The console script `dlq_replay`."""
    from .root import CONTEXT

    dlq_replay.context_settings = CONTEXT
    sys.exit(dlq_replay.main(prog_name="dlq_replay"))
