"""Which dead letters a command means: by name, or by what they have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .parameters import Moment

if TYPE_CHECKING:
    from ackbone.admin.dead_letters import DeadLetters
    from ackbone.core.records import LetterFilter

Fn = TypeVar("Fn", bound=Callable[..., Any])
OPTIONS = "--queue, --type, --reason, --error, --since, --before"
"""The options of `filters` that choose letters by themselves."""


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
        from ackbone.core.records import LetterFilter

        where = LetterFilter(
            queue=queue, type=type_, reason=reason, error=error, tenant_id=tenant, since_us=since,
            before_us=before,
        )  # fmt: skip
        return fn(*args, where=where, **options)

    return wrapped  # type: ignore[return-value]


async def choose(
    letters: DeadLetters, names: Sequence[str], where: LetterFilter, limit: int | None
) -> list[str]:
    """Ids of the letters that are meant, settled once."""
    if not names:
        return await letters.chosen(where, limit=limit)
    found = [await letters.find(name, tenant_id=where.tenant_id) for name in names]
    return await letters.chosen(found)
