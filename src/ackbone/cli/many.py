"""One act on many items: which ones, dry run, question, act, count; the same for every command."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ackbone.core.errors import AckboneError

from .output import safe
from .session import Exit, Session, exit_code, stop

if TYPE_CHECKING:
    import asyncio

    from ackbone.core.delivery_desk import DeliveryFilter
    from ackbone.core.records import LetterFilter

T = TypeVar("T")
_CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


class Words(NamedTuple):
    """What a command says of its items."""

    done: str
    """What became of each one, such as `discarded`."""
    nothing: str
    """Said if there is no item."""
    go_on: str = ""
    """Said after Ctrl+C: how the rest is done."""


class Ended(NamedTuple):
    """What became of one item."""

    id: str
    record: dict[str, Any]
    """What --json shows of it, without the error."""
    error: AckboneError | None
    note: str = ""
    """Said behind the word for a success."""


def refuse_unclear(
    names: Sequence[str], where: LetterFilter | DeliveryFilter, every: bool, *, options: str
) -> None:
    """Refuse anything but ids, or a choice by options, or --all: exactly one of the three.

    A tenant beside ids only says where to look.
    """
    empty = type(where)()
    told = {
        name for name in where.__struct_fields__ if getattr(where, name) != getattr(empty, name)
    }
    chosen = bool(told - {"tenant_id"}) or ("tenant_id" in told and not names)
    if names and (every or chosen):
        raise click.UsageError("Give ids, or choose by options; not both.")
    if not names and not every and not chosen:
        raise click.UsageError(f"Which ones? Give ids, {options}, or --all.")


def confirm(question: str) -> None:
    """Ask; without a terminal to ask on, --yes is needed."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Say so with --yes.")
    click.confirm(question, abort=True, err=True)


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
    """Act on all of these, show what became of each, and end with the code that the sum means.

    `act` gets an event that the first Ctrl+C or SIGTERM sets: it stops between two items then.
    `preview` is what a dry run shows instead. `question` is asked before, if there is any item.
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
    """Say the sum. After Ctrl+C it says what is left, and how to go on."""
    left, asked_by = total - done - len(errors), session.signals.number
    failed = f", {len(errors)} not" if errors else ""
    if asked_by is not None and left > 0:
        session.out.say(
            f"stopped: {done} {words.done}{failed}, {left} left as they were{words.go_on}"
        )
        stop(_CODES[asked_by])
    if not total:
        session.out.say(words.nothing)
    elif total > 1:
        session.out.say(f"{done} {words.done}{failed}")
    if errors:
        stop(Exit.PARTIAL if done else exit_code(errors[0]))


async def on_each(
    session: Session, names: Sequence[str], act: Callable[[str], Awaitable[tuple[object, str]]]
) -> None:
    """Act on each name, and show the record and the line that `act` returns.

    An error is raised if it is the only item's. Of several items, the others are still done.
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
