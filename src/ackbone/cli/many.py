"""One action on many items: choose, dry run, confirm, act, count; the same for every command."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import click

from ackbone.core.errors import AckboneError
from ackbone.core.outbound.delivery_records import DeliveryFilter
from ackbone.core.records import LetterFilter

from .output import safe
from .parameters import in_tenant, together, yes_to_several
from .session import Exit, Session, exit_code, stop

T = TypeVar("T")
Fn = TypeVar("Fn", bound=Callable[..., Any])
_CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


class Words(NamedTuple):
    """The words of a command for its items."""

    done: str
    """The participle for one success, such as `discarded`."""
    nothing: str
    """The line for no items."""
    go_on: str = ""
    """Added after Ctrl+C: how to do the rest."""


class Ended(NamedTuple):
    """The result of the action on one item."""

    id: str
    record: dict[str, Any]
    """The item for --json, without the error."""
    error: AckboneError | None
    note: str = ""
    """Text after the participle."""


def refuse_unclear(
    names: Sequence[str], where: LetterFilter | DeliveryFilter, every: bool, *, options: str
) -> None:
    """Raise a usage error unless there are either ids, or filter options, or --all.

    A tenant beside ids only narrows the search.
    """
    empty = type(where)()
    told = {
        name for name in where.__struct_fields__ if getattr(where, name) != getattr(empty, name)
    }
    chosen = bool(told - {"tenant_id"}) or ("tenant_id" in told and not names)
    if names and (every or chosen):
        raise click.UsageError("Give ids or filter options, not both.")
    if not names and not every and not chosen:
        raise click.UsageError(f"Which ones? Give ids, {options}, or --all.")


def confirm(question: str) -> None:
    """Ask the question. Without a terminal, --yes is required."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Confirm with --yes.")
    click.confirm(question, abort=True, err=True)


def several(verb: str) -> Callable[[Fn], Fn]:
    """Add --tenant and --yes; without --yes, ask before several messages are acted on."""

    def decorate(fn: Fn) -> Fn:
        @functools.wraps(fn)
        def asked(*args: Any, names: Sequence[str], yes: bool, **options: Any) -> Any:
            if len(names) > 1 and not yes:
                confirm(f"{verb} {len(names)} messages?")
            return fn(*args, names=names, **options)

        return together(in_tenant, yes_to_several)(cast(Fn, asked))

    return decorate


async def on_many(
    session: Session,
    ids: Sequence[str],
    act: Callable[[asyncio.Event], AsyncIterator[T]],
    *,
    ended: Callable[[T], Ended],
    words: Words,
    preview: Callable[[], Awaitable[None]],
    dry_run: bool,
    question: str | None = None,
) -> None:
    """Act on all items, show the result of each, and end with the exit code for the total.

    `act` gets an event that the first Ctrl+C or SIGTERM sets, and stops between two items then.
    `preview` shows a dry run. `question` is asked first, if there are items.
    """
    if dry_run:
        await preview()
        return
    if ids and question is not None:
        confirm(question)
    done, errors = 0, list[AckboneError]()
    with (
        session.signals.gently() as asked,
        session.out.progress(words.done, len(ids)) as advance,
    ):
        async for each in act(asked):
            item = ended(each)
            record = {**item.record, "error": item.error}
            if item.error is None:
                done += 1
                session.out.data(record, f"{safe(item.id)} {words.done}{item.note}")
            else:
                errors.append(item.error)
                session.out.data(record)
                session.out.say(f"ackbone: {item.error}")
            advance(1)
    _count(session, words, len(ids), done, errors)


def _count(
    session: Session, words: Words, total: int, done: int, errors: Sequence[AckboneError]
) -> None:
    """Print the total. After Ctrl+C, print how many items are left and how to continue."""
    left, asked_by = total - done - len(errors), session.signals.number
    failed = f", {len(errors)} failed" if errors else ""
    if asked_by is not None and left > 0:
        session.out.say(f"stopped: {done} {words.done}{failed}, {left} not changed{words.go_on}")
        stop(_CODES[asked_by])
    if not total:
        session.out.say(words.nothing)
    elif total > 1:
        session.out.say(f"{done} {words.done}{failed}")
    if errors:
        stop(Exit.PARTIAL if done else exit_code(errors[0]))


def show_switch(session: Session, kind: str, name: str, *, paused: bool, changed: bool) -> None:
    """Show that a queue or channel is paused or resumed now."""
    note = "" if changed else " (it already was)"
    text = f"{safe(name)} is {'paused' if paused else 'resumed'}{note}"
    session.out.data({kind: name, "paused": paused, "changed": changed}, text)


async def on_each(
    session: Session, names: Sequence[str], act: Callable[[str], Awaitable[tuple[object, str]]]
) -> None:
    """Act on each name and show the record and the line that `act` returns.

    With one name, an error is raised. With several, the rest is still done.
    """
    errors: list[AckboneError] = []
    for name in names:
        try:
            record, line = await act(name)
        except AckboneError as error:
            if len(names) == 1:
                raise
            errors.append(error)
            session.out.say(f"ackbone: {error}")
            continue
        session.out.data(record, line)
    if errors:
        stop(Exit.PARTIAL if len(errors) < len(names) else exit_code(errors[0]))
