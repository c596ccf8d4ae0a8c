"""`ackbone deliveries retry`, `edit` and `discard`."""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ackbone.core.errors import AckboneError, Conflict

from .many import Ended, Words, on_many, refuse_unclear
from .output import safe
from .parameters import Moment
from .root import examples
from .session import Session, command_options

if TYPE_CHECKING:
    from ackbone.admin.deliveries import Deliveries, Treated
    from ackbone.core.outbound.delivery_records import DeliveryFilter, DeliveryRecord

Fn = TypeVar("Fn", bound=Callable[..., Any])
STATUSES = ("pending", "queued", "sending", "sent", "failed", "unknown", "discarded")
_FILTERS = "--status, --channel, --tenant, --since"
_NOTHING = "no reply matches"


def filters(
    statuses: Sequence[str] = STATUSES, *, help: str = "Only replies in this state."
) -> Callable[[Fn], Fn]:
    """Add --status, --channel, --tenant and --since, passed on as one `DeliveryFilter`."""

    def decorate(fn: Fn) -> Fn:
        @click.option("--status", type=click.Choice(statuses), help=help)
        @click.option("--channel", help="Only this channel.")
        @click.option("--tenant", help="Only this tenant.")
        @click.option(
            "--since",
            type=Moment(),
            help="Only created since this time: 15m, 2d (ago) or 2025-11-20T10:00.",
        )
        @functools.wraps(fn)
        def wrapped(
            *args: Any, status: str | None, channel: str | None, tenant: str | None,
            since: int | None, **options: Any,
        ) -> Any:  # fmt: skip
            from ackbone.core.outbound.delivery_records import DeliveryFilter

            where = DeliveryFilter(status=status, channel=channel, tenant_id=tenant, since_us=since)
            return fn(*args, where=where, **options)

        return wrapped  # type: ignore[return-value]

    return decorate


@click.command(
    epilog=examples(
        "ackbone deliveries retry 5e0c1d2a 77b0f3c4",
        "ackbone deliveries retry --channel telegram --since 2h --dry-run",
        "ackbone deliveries retry --status unknown --yes",
        "ackbone deliveries retry --all",
    )
)
@click.argument("names", metavar="[ID]...", nargs=-1)
@filters(
    ("failed", "unknown", "pending"),
    help="Only replies in this state (default: failed).",
)
@click.option("--limit", type=click.IntRange(1), help="At most this many, oldest first.")
@click.option("--all", "every", is_flag=True, help="All failed replies.")
@click.option("--dry-run", is_flag=True, help="Show which replies are meant and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@command_options
def retry(session: Session, names: Sequence[str], where: DeliveryFilter, **options: Any) -> None:
    """Send replies again, at once and with a full set of attempts.

    Give ids, or choose by options; --all retries all failed replies. An unknown reply may have
    arrived: it is sent again only if you give its id or --status unknown.
    """
    refuse_unclear(names, where, options["every"], options=_FILTERS)
    session.run(_retry(session, names, where, options))


async def _retry(
    session: Session,
    names: Sequence[str],
    where: DeliveryFilter,
    options: dict[str, Any],
) -> None:
    from ackbone.admin.deliveries import Deliveries, not_retriable

    async with session.acting() as (_, records, operations):
        use = Deliveries(records, operations)
        ids = await _choose(use, names, where, options["limit"])
        question = f"Send {len(ids)} {_replies(len(ids))} again?"
        await on_many(
            session,
            ids,
            lambda asked: use.retry(ids, stop=asked),
            ended=_ended,
            words=Words("due again", _NOTHING),
            preview=lambda: _show_choice(
                session, use.read(ids), ids, not_retriable, "would be sent again"
            ),
            dry_run=options["dry_run"],
            question=None if names or options["yes"] else question,
        )


async def _choose(
    use: Deliveries, names: Sequence[str], where: DeliveryFilter, limit: int | None
) -> list[str]:
    """Return the ids of the chosen replies; without --status, of the failed ones."""
    if names:
        found = [await use.find(name, tenant_id=where.tenant_id) for name in names]
        return list(dict.fromkeys(each.id for each in found))
    from msgspec.structs import replace

    return await use.chosen(replace(where, status=where.status or "failed"), limit=limit)


async def _show_choice(
    session: Session,
    records: AsyncIterator[DeliveryRecord],
    ids: Sequence[str],
    problem_with: Callable[[DeliveryRecord], Conflict | None],
    word: str,
) -> None:
    from ackbone.admin.deliveries import short_names

    out, rows, good = session.out, [], 0
    names = dict(zip(ids, short_names(ids), strict=True))
    async for record in records:
        problem = problem_with(record)
        good += problem is None
        what = word if problem is None else "cannot"
        rows.append((
            {"id": record.id, "channel": record.channel, "status": record.status,
             "what": what, "error": problem},
            (names[record.id], record.channel, record.recipient, record.status, what,
             record.last_error or ""),
        ))  # fmt: skip
    if rows:
        out.table(("id", "channel", "to", "status", "what", "error"), rows)
    out.say(f"{good} {_replies(good)} {word}; nothing was changed")


@click.command(
    epilog=examples(
        "ackbone deliveries edit 5e0c1d2a --content 'The parcel comes on Tuesday.' --retry",
        "ackbone deliveries edit 5e0c1d2a --file answer.txt",
        "ackbone deliveries edit 5e0c1d2a          # opens your $EDITOR",
    )
)
@click.argument("name", metavar="ID")
@click.option("--content", help="The new text.")
@click.option(
    "--file",
    type=click.Path(allow_dash=True, dir_okay=False, path_type=Path),
    help="Read the new text from this file; '-' reads standard input.",
)
@click.option("--retry", "again", is_flag=True, help="Send it at once.")
@click.option("--tenant", help="Look only at this tenant.")
@command_options
def edit(session: Session, name: str, **options: Any) -> None:
    """Change the text of a reply that was not sent.

    A waiting reply is sent with the new text; a failed one stays failed until it is retried.
    """
    if options["content"] is not None and options["file"] is not None:
        raise click.UsageError("--content and --file exclude each other.")
    session.run(_edit(session, name, options))


async def _edit(session: Session, name: str, options: dict[str, Any]) -> None:
    from ackbone.admin.deliveries import Deliveries

    async with session.acting() as (_, records, operations):
        use = Deliveries(records, operations)
        record = await use.find(name, tenant_id=options["tenant"])
        await use.edit(record, _new_text(record, options))
        error: AckboneError | None = None
        if options["again"]:
            (answer,) = [each async for each in use.retry([record.id])]
            error = answer.error
    word = "edited" if error or not options["again"] else "edited, and due again"
    session.out.data(
        {"id": record.id, "edited": True, "retried": options["again"] and error is None},
        f"{safe(record.id)} {word}",
    )
    if error is not None:
        raise error
    if record.status in ("failed", "unknown") and not options["again"]:
        session.out.say(f"to send it: ackbone deliveries retry {record.id}")


def _new_text(record: DeliveryRecord, options: dict[str, Any]) -> str:
    content: str | None = options["content"]
    if content is not None:
        return content
    file: Path | None = options["file"]
    if file is not None:
        return _read(file)
    if not sys.stdin.isatty():
        raise click.UsageError("Give the new text: --content or --file.")
    before = record.content
    # An editor adds a line break at the end, which the reply did not have.
    after = click.edit(before if before.endswith("\n") else f"{before}\n", extension=".txt")
    if after is None or after.rstrip("\n") == before.rstrip("\n"):
        raise Conflict("nothing was changed")
    return after if before.endswith("\n") else after.removesuffix("\n")


def _read(file: Path) -> str:
    try:
        found = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return found.decode("utf-8")
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is not UTF-8 text") from error


@click.command(
    epilog=examples(
        "ackbone deliveries discard 5e0c1d2a --reason 'the customer called'",
        "ackbone deliveries discard 5e0c1d2a 77b0f3c4 --yes",
        "ackbone deliveries discard --channel telegram --since 2h --dry-run",
        "ackbone deliveries discard --all --reason 'too old to be of use'",
    )
)
@click.argument("names", metavar="[ID]...", nargs=-1)
@filters(
    ("failed", "unknown", "pending", "queued"),
    help="Only replies in this state (default: failed).",
)
@click.option(
    "--reason",
    "--why",
    "reason",
    default="",
    help="Your reason, for the ledger.",
)
@click.option("--limit", type=click.IntRange(1), help="At most this many, oldest first.")
@click.option("--all", "every", is_flag=True, help="All failed replies.")
@click.option("--dry-run", is_flag=True, help="Show which replies are meant and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation, even for several.")
@command_options
def discard(session: Session, names: Sequence[str], where: DeliveryFilter, **options: Any) -> None:
    """Give up replies: they are not sent, and kept like sent ones.

    Give ids, or choose by options; --all discards all failed replies. Later replies of the same
    conversation are sent.
    """
    refuse_unclear(names, where, options["every"], options=_FILTERS)
    session.run(_discard(session, names, where, options))


async def _discard(
    session: Session,
    names: Sequence[str],
    where: DeliveryFilter,
    options: dict[str, Any],
) -> None:
    from ackbone.admin.deliveries import Deliveries, not_discardable

    async with session.acting() as (_, records, operations):
        use = Deliveries(records, operations)
        ids = await _choose(use, names, where, options["limit"])
        is_clear = options["yes"] or (names and len(ids) == 1)
        await on_many(
            session,
            ids,
            lambda asked: use.discard(ids, reason=options["reason"], stop=asked),
            ended=_ended,
            words=Words("discarded", _NOTHING),
            preview=lambda: _show_choice(
                session, use.read(ids), ids, not_discardable, "would be discarded"
            ),
            dry_run=options["dry_run"],
            question=None if is_clear else f"Discard {len(ids)} {_replies(len(ids))}?",
        )


def _ended(treated: Treated) -> Ended:
    return Ended(treated.id, {"id": treated.id}, treated.error)


def _replies(number: int) -> str:
    return "reply" if number == 1 else "replies"
