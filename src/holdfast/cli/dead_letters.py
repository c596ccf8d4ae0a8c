"""`holdfast dlq`: dead letters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from holdfast.core.errors import Conflict

from .bodies import show_body
from .examples import examples
from .output import Output, dump, plain, safe, when
from .parameters import Header, Json, Moment
from .root import Group
from .session import Exit, Session, command_options, encoder, exit_code, stop

if TYPE_CHECKING:
    from holdfast.admin.dead_letters import DeadLetters, Edits, Handled
    from holdfast.core.records import DeadLetter, LetterFilter

Fn = TypeVar("Fn", bound=Callable[..., Any])


@click.group(cls=Group, epilog=examples("holdfast dlq list", "holdfast dlq replay ID"))
def dlq() -> None:
    """Look at dead letters; replay, edit or discard them.

    A dead letter is a message that could not be processed, kept whole with its reason and history.
    """


def filters(fn: Fn) -> Fn:
    """--queue, --reason, --tenant, --since and --limit, as one `LetterFilter`."""

    @click.option("--queue", help="Only of this queue.")
    @click.option("--reason", help="Only with this reason: retries_exhausted, undecodable, …")
    @click.option("--tenant", help="Only of this tenant.")
    @click.option("--since", type=Moment(), help="Only since then: 15m, 2d or 2025-11-20T10:00.")
    @click.option("--limit", type=click.IntRange(1), help="At most so many.")
    @functools.wraps(fn)
    def wrapped(
        *args: Any, queue: str | None, reason: str | None, tenant: str | None,
        since: int | None, **options: Any,
    ) -> Any:  # fmt: skip
        from holdfast.core.records import LetterFilter

        where = LetterFilter(queue=queue, reason=reason, tenant_id=tenant, since_us=since)
        return fn(*args, where=where, **options)

    return wrapped  # type: ignore[return-value]


@dlq.command(
    "list",
    epilog=examples(
        "holdfast dlq list --queue orders --since 1d",
        "holdfast dlq list --state all --json",
    ),
)
@filters
@click.option(
    "--state",
    type=click.Choice(["open", "replayed", "discarded", "all"]),
    default="open",
    show_default=True,
    help="Only in this state.",
)
@click.option("--cursor", help="Go on behind the letter with this id.")
@command_options
def list_(
    session: Session, where: LetterFilter, limit: int | None, state: str, cursor: str | None
) -> None:
    """List dead letters, the newest first."""
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
    if not shown and not out.as_json:
        out.say("no dead letters" if cursor is None else "no more dead letters")
        return
    out.table(
        ("id", "queue", "type", "reason", "failures", "when (utc)", "state", "error"),
        [(_summary(each), _cells(each)) for each in shown],
    )
    if len(found) > limit:
        out.say(f"there are more: add --cursor {shown[-1].id}")


def _summary(letter: DeadLetter) -> dict[str, Any]:
    found: dict[str, Any] = plain(letter)
    for name in ("body", "body_info", "intact", "history"):
        found.pop(name)
    return found


def _cells(letter: DeadLetter) -> Sequence[object]:
    error = letter.error if len(letter.error) <= 60 else f"{letter.error[:59]}…"
    return (
        letter.id, letter.queue, letter.type or "-", letter.reason, letter.retry_count,
        when(letter.failed_at_us), letter.state, error,
    )  # fmt: skip


@dlq.command(
    epilog=examples("holdfast dlq show 0199a1e1-ab12", "holdfast dlq show order-4711 --json")
)
@click.argument("name", metavar="ID")
@click.option("--tenant", help="Look at this tenant only.")
@command_options
def show(session: Session, name: str, tenant: str | None) -> None:
    """Show a dead letter with its history and its body.

    ID is the letter's or its message's id, or the beginning of either.
    """
    session.run(_show(session, name, tenant))


async def _show(session: Session, name: str, tenant: str | None) -> None:
    from holdfast.admin.dead_letters import DeadLetters

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
    for label, value in (
        ("message", letter.message_id),
        ("queue", letter.queue),
        ("type", letter.type or "-"),
        ("tenant", letter.tenant_id),
        ("reason", letter.reason),
        ("error", letter.error),
        ("failed", f"{when(letter.failed_at_us)} UTC"),
        ("state", f"{letter.state}{settled}"),
        ("replay", letter.replay_id),
    ):
        if value:
            out.line(f"  {label:<9} {safe(value)}")
    show_history(out, letter.history)
    show_body(out, reading, letter.body)


def show_history(out: Output, history: Sequence[Any]) -> None:
    """Earlier attempts, a line each."""
    if history:
        out.line("  history")
    for each in history:
        at = each.get("at")
        moment = when(at) if isinstance(at, int) else "-"
        crash = " (crash)" if each.get("crash") else ""
        out.line(
            f"    attempt {safe(each.get('attempt', '?'))}  {moment}{crash}  "
            f"{safe(each.get('error', ''))}"
        )


@dlq.command(
    epilog=examples(
        "holdfast dlq replay 0199a1e1-ab12 0199a1e1-ab34",
        "holdfast dlq replay --queue orders --reason retries_exhausted --rate 5",
        "holdfast dlq replay --all --dry-run",
    )
)
@click.argument("names", metavar="[ID]...", nargs=-1)
@filters
@click.option("--all", "every", is_flag=True, help="All that are open.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="At most so many a second."
)
@click.option("--to-queue", help="Send them to this queue instead of their own.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@command_options
def replay(session: Session, names: Sequence[str], where: LetterFilter, **options: Any) -> None:
    """Send dead letters again, as new messages.

    Each new message has an id of its own and names the old one (metadata.replay_of). Name letters,
    or choose by --queue, --reason, --tenant, --since; --all takes all that are open.
    """
    _refuse_unclear(names, where, options["every"])
    session.run(_replay(session, names, where, options))


async def _replay(
    session: Session, names: Sequence[str], where: LetterFilter, options: dict[str, Any]
) -> None:
    from holdfast.admin.dead_letters import DeadLetters, Edits

    dry_run = options["dry_run"]
    async with session.acting() as (app, records, operations):
        letters = DeadLetters(records, operations, encode=encoder(app), codec_of=session.codec_of)
        chosen: Any = where
        total = len(names) or await letters.count(where, limit=options["limit"])
        if names:
            chosen = [await letters.find(name, tenant_id=where.tenant_id) for name in names]
        handled = letters.replay(
            chosen,
            limit=options["limit"],
            rate=options["rate"],
            edits=Edits(queue=options["to_queue"]),
            dry_run=dry_run,
        )
        tally = Tally(session, "would be replayed" if dry_run else "replayed", total)
        await tally.take(handled)
    tally.finish()


@dlq.command(
    epilog=examples(
        "holdfast dlq edit 0199a1e1-ab12 --payload '{\"amount\": 12}'",
        "holdfast dlq edit 0199a1e1-ab12          # opens your $EDITOR",
    )
)
@click.argument("name", metavar="ID")
@click.option("--payload", type=Json(), help="The new payload as JSON; '-' reads standard input.")
@click.option("--type", "type_", help="The new message type.")
@click.option("--header", type=Header(), multiple=True, help="NAME=VALUE to set; may be repeated.")
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
    from holdfast.admin.dead_letters import DeadLetters

    async with session.acting() as (app, records, operations):
        letters = DeadLetters(records, operations, encode=encoder(app), codec_of=session.codec_of)
        letter = await letters.find(name, tenant_id=options["tenant"])
        edits = _edits(letters, letter, options)
        handled = letters.replay([letter], edits=edits, dry_run=options["dry_run"])
        tally = Tally(session, "would be replayed" if options["dry_run"] else "replayed", 1)
        await tally.take(handled)
    tally.finish()


def _edits(letters: DeadLetters, letter: DeadLetter, options: dict[str, Any]) -> Edits:
    import msgspec

    from holdfast.admin.dead_letters import Edits

    payload: Any = msgspec.UNSET if options["payload"] is None else options["payload"]
    if payload is msgspec.UNSET and not (options["type_"] or options["header"]):
        if not sys.stdin.isatty():
            raise click.UsageError("Say what to change: --payload, --type or --header.")
        payload = _in_editor(letters, letter)
    return Edits(
        payload=payload,
        type=options["type_"],
        headers=dict(options["header"]),
        queue=options["to_queue"],
    )


def _in_editor(letters: DeadLetters, letter: DeadLetter) -> Any:
    from holdfast.core.json_text import loads

    message = letters.read(letter).message
    before = dump(message.payload if message is not None else None, indent=2)
    after = click.edit(before + "\n", extension=".json")
    if after is None or after.strip() == before.strip():
        raise Conflict("nothing was changed, nothing was sent")
    return loads(after.encode())


@dlq.command(
    epilog=examples(
        "holdfast dlq discard 0199a1e1-ab12 --why 'test data'",
        "holdfast dlq discard --queue orders --reason undecodable --yes",
    )
)
@click.argument("names", metavar="[ID]...", nargs=-1)
@filters
@click.option("--all", "every", is_flag=True, help="All that are open.")
@click.option("--why", default="", help="Your reason, for the ledger.")
@click.option("--dry-run", is_flag=True, help="Show what would be discarded.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@command_options
def discard(session: Session, names: Sequence[str], where: LetterFilter, **options: Any) -> None:
    """Settle dead letters without sending them again.

    A discarded letter is kept, and cannot be replayed any more.
    """
    _refuse_unclear(names, where, options["every"])
    session.run(_discard(session, names, where, options))


async def _discard(
    session: Session, names: Sequence[str], where: LetterFilter, options: dict[str, Any]
) -> None:
    from holdfast.admin.dead_letters import DeadLetters

    dry_run = options["dry_run"]
    async with session.acting() as (_, records, operations):
        letters = DeadLetters(records, operations, codec_of=session.codec_of)
        chosen: Any = where
        total = len(names) or await letters.count(where, limit=options["limit"])
        if names:
            chosen = [await letters.find(name, tenant_id=where.tenant_id) for name in names]
        elif total and not dry_run and not options["yes"]:
            confirm(f"Discard {total} dead letters?")
        handled = letters.discard(
            chosen, reason=options["why"], limit=options["limit"], dry_run=dry_run
        )
        tally = Tally(session, "would be discarded" if dry_run else "discarded", total)
        await tally.take(handled)
    tally.finish()


def confirm(question: str) -> None:
    """Ask; without a terminal to ask on, --yes is needed."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Say so with --yes.")
    click.confirm(question, abort=True, err=True)


def _refuse_unclear(names: Sequence[str], where: LetterFilter, every: bool) -> None:
    chosen = any(value is not None for value in (where.queue, where.reason, where.since_us)) or (
        where.tenant_id is not None and not names
    )
    if names and (every or chosen):
        raise click.UsageError("Give ids, or choose by options; not both.")
    if not names and not every and not chosen:
        raise click.UsageError("Which ones? Give ids, --queue, --reason, --since, or --all.")


class Tally:
    """Shows what became of each letter, and ends with the code that the sum means."""

    def __init__(self, session: Session, word: str, total: int) -> None:
        self._session = session
        self._word = word
        self._total = total
        self._done = 0
        self._errors: list[Any] = []

    async def take(self, handled: Any) -> None:
        with self._session.out.progress(self._word, self._total) as advance:
            async for each in handled:
                self._add(each)
                advance(1)

    def _add(self, handled: Handled) -> None:
        out = self._session.out
        letter = handled.letter
        record = {
            "id": letter.id,
            "message_id": letter.message_id,
            "queue": letter.queue,
            "replay_id": handled.replay_id,
            "error": handled.error,
        }
        if handled.error is not None:
            self._errors.append(handled.error)
            out.data(record)
            out.say(f"holdfast: {handled.error}")
            return
        self._done += 1
        as_what = f" as {handled.replay_id}" if handled.replay_id else ""
        out.data(record, f"{letter.id} {self._word}{as_what}")

    def finish(self) -> None:
        out = self._session.out
        if not self._total and not self._errors:
            out.say("no dead letter fits")
        elif self._total > 1:
            failed = f", {len(self._errors)} not" if self._errors else ""
            out.say(f"{self._done} {self._word}{failed}")
        if self._errors:
            stop(Exit.PARTIAL if self._done else exit_code(self._errors[0]))
