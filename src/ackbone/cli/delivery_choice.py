"""Which replies a command means: by name, or by what they have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import many
from .parameters import Moment

if TYPE_CHECKING:
    from ackbone.admin.deliveries import Deliveries
    from ackbone.core.delivery_desk import DeliveryFilter

Fn = TypeVar("Fn", bound=Callable[..., Any])
STATUSES = ("pending", "queued", "sending", "sent", "failed", "unknown", "discarded")


def filters(
    statuses: Sequence[str] = STATUSES, *, help: str = "Only in this state."
) -> Callable[[Fn], Fn]:
    """--status, --channel, --tenant and --since as one `DeliveryFilter`."""

    def decorate(fn: Fn) -> Fn:
        @click.option("--status", type=click.Choice(statuses), help=help)
        @click.option("--channel", help="Only for this channel.")
        @click.option("--tenant", help="Only of this tenant.")
        @click.option(
            "--since", type=Moment(), help="Only made since then: 15m, 2d or 2025-11-20T10:00."
        )
        @functools.wraps(fn)
        def wrapped(
            *args: Any, status: str | None, channel: str | None, tenant: str | None,
            since: int | None, **options: Any,
        ) -> Any:  # fmt: skip
            from ackbone.core.delivery_desk import DeliveryFilter

            where = DeliveryFilter(status=status, channel=channel, tenant_id=tenant, since_us=since)
            return fn(*args, where=where, **options)

        return wrapped  # type: ignore[return-value]

    return decorate


def refuse_unclear(names: Sequence[str], where: DeliveryFilter, every: bool) -> None:
    """Ids, or a choice by options, or --all: exactly one of them."""
    many.refuse_unclear(names, where, every, options="--status, --channel, --tenant, --since")


async def choose(
    use: Deliveries, names: Sequence[str], where: DeliveryFilter, limit: int | None
) -> list[str]:
    """Ids of the replies that are meant, settled once. Without a status: those that failed."""
    if names:
        found = [await use.find(name, tenant_id=where.tenant_id) for name in names]
        return list(dict.fromkeys(each.id for each in found))
    from msgspec.structs import replace

    return await use.chosen(replace(where, status=where.status or "failed"), limit=limit)
