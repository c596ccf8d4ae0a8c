"""`ackbone queues`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import click

from ackbone.admin import queues as use

from .many import show_switch
from .output import span, when
from .session import Session, command, group


@group("ackbone queues list", "ackbone queues pause orders")
def queues() -> None:
    """List, pause and resume queues."""


@command("ackbone queues list", "ackbone queues list --json", of=queues)
async def list_(session: Session) -> None:
    """List all queues with their messages by state; `ackbone stats --help` explains the columns."""
    async with session.reading() as records:
        found, _ = await use.list_queues(records, session.queues, session.look_at_brokers)
    several = session.has_several_brokers
    rows = [
        (
            state,
            (
                state.queue, *((state.broker,) if several else ()), state.ready, state.delayed,
                state.running, state.waiting, state.parked, state.dead, span(state.oldest_age_s),
                when(state.paused_at_us),
            ),
        )
        for state in found
    ]  # fmt: skip
    session.out.table(
        ("queue", *(("broker",) if several else ()), "ready", "delayed", "running", "waiting",
         "parked", "dead", "oldest", "paused (utc)"),
        rows,
        nothing="no queues yet",
    )  # fmt: skip


@command("ackbone queues pause orders", "ackbone queues pause orders billing", of=queues)
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
async def pause(session: Session, names: Sequence[str]) -> None:
    """Stop taking messages from queues. Current runs go on, and sending still works."""
    await _each(session, names, use.pause, paused=True)


@command("ackbone queues resume orders", "ackbone queues resume orders --json", of=queues)
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
async def resume(session: Session, names: Sequence[str]) -> None:
    """Take messages from paused queues again."""
    await _each(session, names, use.resume, paused=False)


async def _each(
    session: Session,
    names: Sequence[str],
    act: Callable[..., Awaitable[bool]],
    *,
    paused: bool,
) -> None:
    async with session.acting() as (_, records, operations):
        for name in names:
            changed = await act(records, operations, name, session.queues)
            show_switch(session, "queue", name, paused=paused, changed=changed)
