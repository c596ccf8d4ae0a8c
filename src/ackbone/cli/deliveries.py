"""`ackbone deliveries`: replies and channels."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from ackbone.admin.deliveries import (
    DISCARDABLE,
    RETRIABLE,
    Deliveries,
    Treated,
    refusal,
    short_names,
)
from ackbone.core.errors import AckboneError, Conflict
from ackbone.core.outbound.delivery_records import DeliveryFilter, DeliveryRecord

from .many import Ended, Words, on_many, refuse_unclear, show_switch
from .output import Output, cut, dump, plain, plain_without, safe, span, when
from .parameters import (
    MOMENT,
    Fn,
    filter_options,
    in_tenant,
    one_id,
    page_limit,
    yes,
    yes_to_several,
)
from .session import Session, command, group

STATUSES = ("pending", "queued", "sending", "sent", "failed", "unknown", "discarded")
_CHOICE = "--status, --channel, --tenant, --since"
_oldest = click.option("--limit", type=click.IntRange(1), help="At most this many, oldest first.")
_dry_run = click.option(
    "--dry-run", is_flag=True, help="Show which replies are meant and change nothing."
)


def _filters(
    statuses: Sequence[str] = STATUSES, *, help: str = "Only replies in this state."
) -> Callable[[Fn], Fn]:
    """Add --status, --channel, --tenant and --since, passed on as one `DeliveryFilter`."""
    return filter_options(
        DeliveryFilter,
        click.option("--status", type=click.Choice(statuses), help=help),
        click.option("--channel", help="Only this channel."),
        click.option("--tenant", "tenant_id", help="Only this tenant."),
        click.option(
            "--since",
            "since_us",
            type=MOMENT,
            help="Only created since this time: 15m, 2d (ago) or 2025-11-20T10:00.",
        ),
    )


@group(
    "ackbone deliveries list --status failed",
    "ackbone deliveries retry 5e0c1d2a",
    "ackbone deliveries pause telegram",
)
def deliveries() -> None:
    """List replies; retry, edit or discard them; pause channels.

    A reply is pending until it is due (queued: behind an earlier one of the conversation), sending
    during an attempt, and then sent or failed. An unknown reply may have arrived; it is not sent
    again until you decide.
    """


@command(
    "ackbone deliveries list --status failed --since 1d",
    "ackbone deliveries list --channel telegram --json",
    of=deliveries,
)
@_filters()
@page_limit
async def list_(session: Session, where: DeliveryFilter, limit: int) -> None:
    """List replies, newest first."""
    out = session.out
    async with session.reading() as records:
        found = await records.deliveries(where, limit=limit + 1)
        paused = await records.paused_channels()
    shown = found[:limit]
    names = short_names([each.id for each in shown])
    out.table(
        ("id", "channel", "to", "status", "retries", "age", "next", "error"),
        [
            (plain_without(each, "content", "options"), _cells(each, name))
            for each, name in zip(shown, names, strict=True)
        ],
        nothing="no replies" if where == type(where)() else "no reply matches",
    )
    if len(found) > limit:
        out.say("more: raise --limit, or filter by --status, --channel or --since")
    for channel in sorted(paused):
        resume = f"ackbone deliveries resume {channel}"
        out.say(f"{channel} is paused; to resume it: {resume}")


def _retries(record: DeliveryRecord) -> int:
    """Return the number of retries made or scheduled; no retry follows the last failure."""
    return min(record.retry_count, record.max_retries)


def _cells(record: DeliveryRecord, name: str) -> Sequence[object]:
    return (
        name, record.channel, cut(record.recipient, 24), status_word(record),
        f"{_retries(record)}/{record.max_retries}", age(record), next_attempt(record),
        cut(record.last_error or ""),
    )  # fmt: skip


def status_word(record: DeliveryRecord) -> str:
    """Return the status, marked "in doubt" if the reply may have arrived."""
    doubtful = record.in_doubt and record.status in ("pending", "queued", "sending", "failed")
    return f"{record.status}, in doubt" if doubtful else record.status


def age(record: DeliveryRecord) -> str:
    return span(max(0.0, time.time() - record.created_at_us / 1e6))


def next_attempt(record: DeliveryRecord) -> str:
    """Return when a pending reply is tried next."""
    if record.status != "pending":
        return "-"
    wait_s = record.due_at_us / 1e6 - time.time()
    return f"in {span(wait_s)}" if wait_s > 0 else "now"


@command(
    "ackbone deliveries show 5e0c1d2a", "ackbone deliveries show 5e0c1d2a --json", of=deliveries
)
@one_id
async def show(session: Session, name: str, tenant: str | None) -> None:
    """Show a reply with its attempts, receipts and text.

    ID is the id of the reply or its beginning.
    """
    out = session.out
    async with session.reading() as records:
        record = await Deliveries(records).find(name, tenant_id=tenant)
        paused = record.channel in await records.paused_channels()
    out.data({**plain(record), "paused": paused})
    if not out.as_json:
        _show_record(out, record, paused=paused)


def _show_record(out: Output, record: DeliveryRecord, *, paused: bool) -> None:
    out.line(out.strong(f"reply {safe(record.id)}"))
    repeats = f", {record.resent} of them possibly repeated" if record.resent else ""
    waits = record.status == "pending"
    out.fields(
        ("channel", record.channel + (" (paused)" if paused else "")),
        ("to", record.recipient),
        ("tenant", record.tenant_id),
        ("status", status_word(record)),
        ("doubt", "it may have arrived" if record.in_doubt and record.status != "sent" else None),
        ("calls", f"{record.calls}{repeats}"),
        ("retries", f"{_retries(record)} of {record.max_retries}"),
        ("error", record.last_error),
        ("next", f"{next_attempt(record)} ({when(record.due_at_us)} UTC)" if waits else None),
        ("tried", f"{when(record.last_attempt_at_us)} UTC" if record.last_attempt_at_us else None),
        ("made", f"{when(record.created_at_us)} UTC"),
        ("expires", f"{when(record.expires_at_us)} UTC" if record.expires_at_us else None),
        ("message", record.task_id),
        ("order", record.conversation),
        ("options", dump(record.options) if record.options else None),
    )
    for number, receipt in enumerate(record.receipts, 1):
        out.line(f"  part {number:<4} arrived{f' as {safe(receipt)}' if receipt else ''}")
    out.line("  text")
    for line in record.content.split("\n"):
        out.line(f"    {safe(line)}")


@command(
    "ackbone deliveries pause telegram", "ackbone deliveries pause slack --json", of=deliveries
)
@click.argument("channels", metavar="CHANNEL...", nargs=-1, required=True)
async def pause(session: Session, channels: Sequence[str]) -> None:
    """Stop sending through channels; their replies wait."""
    await _each(session, channels, paused=True)


@command(
    "ackbone deliveries resume telegram", "ackbone deliveries resume slack email", of=deliveries
)
@click.argument("channels", metavar="CHANNEL...", nargs=-1, required=True)
async def resume(session: Session, channels: Sequence[str]) -> None:
    """Send through paused channels again."""
    await _each(session, channels, paused=False)


async def _each(session: Session, channels: Sequence[str], *, paused: bool) -> None:
    async with session.acting() as (_, records, operations):
        act = operations.pause_channel if paused else operations.unpause_channel
        known = {each.queue for each in await records.reply_counts()}
        for channel in channels:
            changed = await act(channel)
            show_switch(session, "channel", channel, paused=paused, changed=changed)
            if channel not in known:
                session.out.say(f"no reply was ever sent to a channel {channel!r}; check the name")


@command(
    "ackbone deliveries retry 5e0c1d2a 77b0f3c4",
    "ackbone deliveries retry --channel telegram --since 2h --dry-run",
    "ackbone deliveries retry --status unknown --yes",
    "ackbone deliveries retry --all",
    of=deliveries,
)
@click.argument("names", metavar="[ID]...", nargs=-1)
@_filters(("failed", "unknown", "pending"), help="Only replies in this state (default: failed).")
@_oldest
@click.option("--all", "every", is_flag=True, help="All failed replies.")
@_dry_run
@yes
async def retry(
    session: Session, names: Sequence[str], where: DeliveryFilter, **options: Any
) -> None:
    """Send replies again, at once and with a full set of attempts.

    Give ids, or choose by options; --all retries all failed replies. An unknown reply may have
    arrived: it is sent again only if you give its id or --status unknown.
    """
    refuse_unclear(names, where, options["every"], options=_CHOICE)
    async with _chosen(session, names, where, options["limit"]) as (use, ids):
        await on_many(
            session,
            ids,
            lambda asked: use.retry(ids, stop=asked),
            ended=_ended,
            words=Words("due again", "no reply matches"),
            preview=lambda: _show_choice(session, use, ids, RETRIABLE, "sent again"),
            dry_run=options["dry_run"],
            question=None if names or options["yes"] else f"Send {_replies(len(ids))} again?",
        )


@asynccontextmanager
async def _chosen(
    session: Session, names: Sequence[str], where: DeliveryFilter, limit: int | None
) -> AsyncIterator[tuple[Deliveries, Sequence[str]]]:
    """Yield the ids of the chosen replies; without --status, of the failed ones."""
    async with session.acting() as (_, records, operations):
        use = Deliveries(records, operations)
        if names:
            found = [await use.find(name, tenant_id=where.tenant_id) for name in names]
            yield use, list(dict.fromkeys(each.id for each in found))
        else:
            failed = replace(where, status=where.status or "failed")
            yield use, await records.delivery_ids(failed, limit=limit)


async def _show_choice(
    session: Session,
    use: Deliveries,
    ids: Sequence[str],
    statuses: Container[str],
    done: str,
) -> None:
    out, rows, good = session.out, [], 0
    names = dict(zip(ids, short_names(ids), strict=True))
    async for record in use.read(ids):
        problem = refusal(record, statuses, done)
        good += problem is None
        what = f"would be {done}" if problem is None else "cannot"
        rows.append((
            {"id": record.id, "channel": record.channel, "status": record.status,
             "what": what, "error": problem},
            (names[record.id], record.channel, record.recipient, record.status, what,
             record.last_error or ""),
        ))  # fmt: skip
    if rows:
        out.table(("id", "channel", "to", "status", "what", "error"), rows)
    out.say(f"{_replies(good)} would be {done}; nothing was changed")


@command(
    "ackbone deliveries edit 5e0c1d2a --content 'The parcel comes on Tuesday.' --retry",
    "ackbone deliveries edit 5e0c1d2a --file answer.txt",
    "ackbone deliveries edit 5e0c1d2a          # opens your $EDITOR",
    of=deliveries,
)
@click.argument("name", metavar="ID")
@click.option("--content", help="The new text.")
@click.option(
    "--file",
    type=click.Path(allow_dash=True, dir_okay=False, path_type=Path),
    help="Read the new text from this file; '-' reads standard input.",
)
@click.option("--retry", "again", is_flag=True, help="Send it at once.")
@in_tenant
async def edit(session: Session, name: str, **options: Any) -> None:
    """Change the text of a reply that was not sent.

    A waiting reply is sent with the new text; a failed one stays failed until it is retried.
    """
    if options["content"] is not None and options["file"] is not None:
        raise click.UsageError("--content and --file exclude each other.")
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


@command(
    "ackbone deliveries discard 5e0c1d2a --reason 'the customer called'",
    "ackbone deliveries discard 5e0c1d2a 77b0f3c4 --yes",
    "ackbone deliveries discard --channel telegram --since 2h --dry-run",
    "ackbone deliveries discard --all --reason 'too old to be of use'",
    of=deliveries,
)
@click.argument("names", metavar="[ID]...", nargs=-1)
@_filters(
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
@_oldest
@click.option("--all", "every", is_flag=True, help="All failed replies.")
@_dry_run
@yes_to_several
async def discard(
    session: Session, names: Sequence[str], where: DeliveryFilter, **options: Any
) -> None:
    """Give up replies: they are not sent, and kept like sent ones.

    Give ids, or choose by options; --all discards all failed replies. Later replies of the same
    conversation are sent.
    """
    refuse_unclear(names, where, options["every"], options=_CHOICE)
    async with _chosen(session, names, where, options["limit"]) as (use, ids):
        is_clear = options["yes"] or (names and len(ids) == 1)
        await on_many(
            session,
            ids,
            lambda asked: use.discard(ids, reason=options["reason"], stop=asked),
            ended=_ended,
            words=Words("discarded", "no reply matches"),
            preview=lambda: _show_choice(session, use, ids, DISCARDABLE, "discarded"),
            dry_run=options["dry_run"],
            question=None if is_clear else f"Discard {_replies(len(ids))}?",
        )


def _ended(treated: Treated) -> Ended:
    return Ended(treated.id, {"id": treated.id}, treated.error)


def _replies(number: int) -> str:
    return "1 reply" if number == 1 else f"{number} replies"
