"""Which dead letters a command means: by name, or by what they have in common."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .parameters import Moment

if TYPE_CHECKING:
    from holdfast.admin.dead_letters import DeadLetters
    from holdfast.core.records import LetterFilter

Fn = TypeVar("Fn", bound=Callable[..., Any])


def filters(fn: Fn) -> Fn:
    """--queue, --type, --reason, … as one `LetterFilter`, and --limit."""

    @click.option("--queue", help="Only of this queue.")
    @click.option("--type", "type_", help="Only of this message type.")
    @click.option("--reason", help="Only with this reason: retries_exhausted, undecodable, …")
    @click.option("--error", help="Only with this text in their error.")
    @click.option("--tenant", help="Only of this tenant.")
    @click.option("--since", type=Moment(), help="Only since then: 15m, 2d or 2025-11-20T10:00.")
    @click.option("--before", type=Moment(), help="Only before then, in the same words.")
    @click.option("--limit", type=click.IntRange(1), help="At most so many.")
    @functools.wraps(fn)
    def wrapped(
        *args: Any, queue: str | None, type_: str | None, reason: str | None, error: str | None,
        tenant: str | None, since: int | None, before: int | None, **options: Any,
    ) -> Any:  # fmt: skip
        from holdfast.core.records import LetterFilter

        where = LetterFilter(
            queue=queue, type=type_, reason=reason, error=error, tenant_id=tenant, since_us=since,
            before_us=before,
        )  # fmt: skip
        return fn(*args, where=where, **options)

    return wrapped  # type: ignore[return-value]


def refuse_unclear(names: Sequence[str], where: LetterFilter, every: bool) -> None:
    """Ids, or a choice by options, or --all: exactly one of them."""
    told = (where.queue, where.type, where.reason, where.error, where.since_us, where.before_us)
    chosen = any(value is not None for value in told) or (where.tenant_id is not None and not names)
    if names and (every or chosen):
        raise click.UsageError("Give ids, or choose by options; not both.")
    if not names and not every and not chosen:
        raise click.UsageError(
            "Which ones? Give ids, --queue, --type, --reason, --error, --since, --before, or --all."
        )


async def choose(
    letters: DeadLetters, names: Sequence[str], where: LetterFilter, limit: int | None
) -> list[str]:
    """Ids of the letters that are meant, settled once."""
    if not names:
        return await letters.chosen(where, limit=limit)
    found = [await letters.find(name, tenant_id=where.tenant_id) for name in names]
    return await letters.chosen(found)


def confirm(question: str) -> None:
    """Ask; without a terminal to ask on, --yes is needed."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Say so with --yes.")
    click.confirm(question, abort=True, err=True)
