"""`ackbone deliveries`: list, show, pause and resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .delivery_actions import discard, edit, filters, retry
from .output import Output, cut, dump, plain, safe, span, when
from .parameters import one_id, page_limit
from .root import Group, examples
from .session import Session, command_options

if TYPE_CHECKING:
    from ackbone.core.outbound.delivery_records import DeliveryFilter, DeliveryRecord


@click.group(
    cls=Group,
    epilog=examples(
        "ackbone deliveries list --status failed",
        "ackbone deliveries retry 5e0c1d2a",
        "ackbone deliveries pause telegram",
    ),
)
def deliveries() -> None:
    """List replies; retry, edit or discard them; pause channels.

    A reply is pending until it is due (queued: behind an earlier one of its conversation), sending
    during an attempt, and then sent or failed. An unknown reply may have arrived; it is not sent
    again until you decide.
    """


@deliveries.command(
    "list",
    epilog=examples(
        "ackbone deliveries list --status failed --since 1d",
        "ackbone deliveries list --channel telegram --json",
    ),
)
@filters()
@page_limit
@command_options
def list_(session: Session, where: DeliveryFilter, limit: int) -> None:
    """List replies, newest first."""
    session.run(_list(session, where, limit))


async def _list(session: Session, where: DeliveryFilter, limit: int) -> None:
    from ackbone.admin.deliveries import Deliveries, short_names

    out = session.out
    async with session.reading() as records:
        found = await Deliveries(records).listed(where, limit=limit + 1)
        paused = await records.paused_channels()
    shown = found[:limit]
    names = short_names([each.id for each in shown])
    out.table(
        ("id", "channel", "to", "status", "retries", "age", "next", "error"),
        [(_summary(each), _cells(each, name)) for each, name in zip(shown, names, strict=True)],
        nothing="no replies" if where == type(where)() else "no reply matches",
    )
    if len(found) > limit:
        out.say("more: raise --limit, or filter by --status, --channel or --since")
    for channel in sorted(paused):
        resume = f"ackbone deliveries resume {channel}"
        out.say(f"{channel} is paused; to resume it: {resume}")


def _summary(record: DeliveryRecord) -> dict[str, Any]:
    found: dict[str, Any] = plain(record)
    for name in ("content", "options"):
        found.pop(name)
    return found


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


@deliveries.command(
    epilog=examples("ackbone deliveries show 5e0c1d2a", "ackbone deliveries show 5e0c1d2a --json")
)
@one_id
@command_options
def show(session: Session, name: str, tenant: str | None) -> None:
    """Show a reply with its attempts, receipts and text.

    ID is the id of the reply or its beginning.
    """
    session.run(_show(session, name, tenant))


async def _show(session: Session, name: str, tenant: str | None) -> None:
    from ackbone.admin.deliveries import Deliveries

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


@deliveries.command(
    epilog=examples("ackbone deliveries pause telegram", "ackbone deliveries pause slack --json")
)
@click.argument("channels", metavar="CHANNEL...", nargs=-1, required=True)
@command_options
def pause(session: Session, channels: Sequence[str]) -> None:
    """Stop sending through channels; their replies wait."""
    session.run(_each(session, channels, paused=True))


@deliveries.command(
    epilog=examples("ackbone deliveries resume telegram", "ackbone deliveries resume slack email")
)
@click.argument("channels", metavar="CHANNEL...", nargs=-1, required=True)
@command_options
def resume(session: Session, channels: Sequence[str]) -> None:
    """Send through paused channels again."""
    session.run(_each(session, channels, paused=False))


async def _each(session: Session, channels: Sequence[str], *, paused: bool) -> None:
    from ackbone.admin.deliveries import Deliveries

    async with session.acting() as (_, records, operations):
        use = Deliveries(records, operations)
        known = {each.queue for each in await records.reply_counts()}
        act, word = (use.pause, "paused") if paused else (use.resume, "resumed")
        for channel in channels:
            changed = await act(channel)
            note = "" if changed else " (it already was)"
            session.out.data(
                {"channel": channel, "paused": paused, "changed": changed},
                f"{safe(channel)} is {word}{note}",
            )
            if channel not in known:
                session.out.say(f"no reply was ever sent to a channel {channel!r}; check the name")


for each in (retry, edit, discard):
    deliveries.add_command(each)
