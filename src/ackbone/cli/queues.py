"""`ackbone queues`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from .output import safe, span, when
from .root import Group, examples
from .session import Session, command_options


@click.group(cls=Group, epilog=examples("ackbone queues list", "ackbone queues pause orders"))
def queues() -> None:
    """List, pause and resume queues."""


@queues.command("list", epilog=examples("ackbone queues list", "ackbone queues list --json"))
@command_options
def list_(session: Session) -> None:
    """List all queues with their messages by state; `ackbone stats --help` explains the columns."""
    session.run(_list(session))


async def _list(session: Session) -> None:
    from ackbone.admin.queues import list_queues

    async with session.reading() as records:
        found = await list_queues(records, session.queues, session.depths)
    rows = [
        (
            state,
            (
                state.queue, state.ready, state.delayed, state.running, state.waiting,
                state.parked, state.dead, span(state.oldest_age_s), when(state.paused_at_us),
            ),
        )
        for state in found
    ]  # fmt: skip
    session.out.table(
        ("queue", "ready", "delayed", "running", "waiting", "parked", "dead", "oldest",
         "paused (utc)"),
        rows,
        nothing="no queues yet",
    )  # fmt: skip


@queues.command(
    epilog=examples("ackbone queues pause orders", "ackbone queues pause orders billing")
)
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
@command_options
def pause(session: Session, names: Sequence[str]) -> None:
    """Stop taking messages from queues. Current runs go on, and sending still works."""
    session.run(_each(session, names, paused=True))


@queues.command(
    epilog=examples("ackbone queues resume orders", "ackbone queues resume orders --json")
)
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
@command_options
def resume(session: Session, names: Sequence[str]) -> None:
    """Take messages from paused queues again."""
    session.run(_each(session, names, paused=False))


async def _each(session: Session, names: Sequence[str], *, paused: bool) -> None:
    from ackbone.admin import queues as use

    act, word = (use.pause, "paused") if paused else (use.resume, "resumed")
    async with session.acting() as (_, records, operations):
        for name in names:
            changed = await act(records, operations, name, session.queues)
            note = "" if changed else " (it already was)"
            text = f"{safe(name)} is {word}{note}"
            session.out.data({"queue": name, "paused": paused, "changed": changed}, text)
