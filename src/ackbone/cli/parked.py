"""`ackbone parked`: messages that are set aside until they are resumed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click

from ackbone.admin.parked import Parked
from ackbone.core.records import EffectWord, Task

from .bodies import show_body, show_history
from .many import on_each, several
from .output import cut, plain, plain_without, safe, when
from .parameters import EFFECT, in_tenant, one_id, page_limit, some_ids
from .session import Session, command, group

KINDS = ("workflow_pending", "waiting_approval", "raw_payload_invalid", "effect_unknown")
_LEFT_OUT = ("body", "body_info", "intact", "result")


@group("ackbone parked list", "ackbone parked resume ID")
def parked() -> None:
    """List parked messages; resume or discard them.

    A message is parked when it needs an operator or a handler: no worker has a handler for its
    type, a handler raised ParkMessage (both have the kind workflow_pending), it waits for an
    approval, or it is unknown whether an outside effect happened.
    """


@command(
    "ackbone parked list --kind effect_unknown",
    "ackbone parked list --queue orders --json",
    of=parked,
)
@click.option("--queue", help="Only this queue.")
@click.option("--kind", type=click.Choice(KINDS), help="Only messages parked for this reason.")
@click.option("--tenant", "tenant_id", help="Only this tenant.")
@page_limit
@click.option("--cursor", type=int, help="Continue after this position.")
async def list_(session: Session, limit: int, cursor: int | None, **where: Any) -> None:
    """List parked messages, newest first."""
    out = session.out
    async with session.reading() as records:
        found = await records.parked(**where, limit=limit + 1, before=cursor)
    shown = found[:limit]
    out.table(
        ("id", "queue", "type", "kind", "tenant", "accepted (utc)", "why"),
        [
            ({**plain_without(task, *_LEFT_OUT), "cursor": place}, _cells(task))
            for place, task in shown
        ],
        nothing="no parked messages",
    )
    if len(found) > limit:
        out.say(f"more: add --cursor {shown[-1][0]}")


def _cells(task: Task) -> Sequence[object]:
    return (
        task.message_id, task.queue, task.type or "-", task.parked_kind or "-", task.tenant_id,
        when(task.started_at_us), cut(task.error or ""),
    )  # fmt: skip


@command("ackbone parked show 0199a1e1-ab12", "ackbone parked show order-4711 --json", of=parked)
@one_id
async def show(session: Session, name: str, tenant: str | None) -> None:
    """Show a parked message with its failed attempts, effects and body."""
    out = session.out
    async with session.reading() as records:
        use = Parked(records, codec_of=session.codec_of)
        task = await use.find(name, tenant_id=tenant)
        effects = await use.effects(task)
        reading = use.read(task)
    out.data({**plain(task), "effects": effects, "message": reading.message,
              "problem": reading.problem})  # fmt: skip
    if out.as_json:
        return
    out.line(out.strong(f"message {safe(task.message_id)}"))
    out.fields(
        ("queue", task.queue),
        ("type", task.type or "-"),
        ("tenant", task.tenant_id),
        ("kind", task.parked_kind),
        ("why", task.error),
        ("accepted", f"{when(task.started_at_us)} UTC"),
        ("attempts", task.attempt),
        ("key", task.idempotency_key),
        ("order", task.ordering_key),
    )
    for effect in effects:
        end = "begun, outcome unknown" if effect.state == "begun" else "done"
        if effect.state == "begun" and effect.value is not None:
            end += f": it raised {safe(effect.value.decode('utf-8', 'replace'))}"
        out.line(f"  effect    {safe(effect.name)}: {end} ({when(effect.begun_at_us)} UTC)")
    show_history(out, task.history)
    show_body(out, reading, task.body)


@command(
    "ackbone parked resume 0199a1e1-ab12",
    "ackbone parked resume 0199a1e1-ab12 --effect charge=not-done",
    "ackbone parked resume 0199a1e1-ab12 0199a1e1-ab34 --effect charge=not-done",
    "ackbone parked resume 0199a1e1-ab12 --effect 'charge=done:{\"receipt\": 7}'",
    of=parked,
)
@some_ids
@click.option(
    "--effect",
    "effects",
    type=EFFECT,
    multiple=True,
    help="Whether an effect happened: NAME=done, NAME=done:JSON or NAME=not-done.",
)
@in_tenant
async def resume(
    session: Session, names: Sequence[str], effects: Sequence[EffectWord], tenant: str | None
) -> None:
    """Let parked messages run again; this uses no attempt.

    A message parked as effect_unknown needs one --effect for each unknown effect. It applies to
    every message that you name.
    """

    async def act(use: Parked, task: Task) -> None:
        await use.resume(task, effects=effects)

    await _each(session, names, tenant, "resumed", act)


@command(
    "ackbone parked discard 0199a1e1-ab12 --why 'customer cancelled'",
    "ackbone parked discard 0199a1e1-ab12 0199a1e1-ab34 --yes",
    of=parked,
)
@some_ids
@click.option("--why", default="", help="Your reason, for the ledger.")
@several("Discard")
async def discard(session: Session, names: Sequence[str], why: str, tenant: str | None) -> None:
    """End parked messages as discarded; later messages of their conversations go on."""

    async def act(use: Parked, task: Task) -> None:
        await use.discard(task, reason=why)

    await _each(session, names, tenant, "discarded", act)


async def _each(
    session: Session,
    names: Sequence[str],
    tenant: str | None,
    word: str,
    act: Callable[[Parked, Task], Awaitable[None]],
) -> None:
    async with session.acting() as (_, records, operations):
        use = Parked(records, operations, codec_of=session.codec_of)

        async def one(name: str) -> tuple[object, str]:
            task = await use.find(name, tenant_id=tenant)
            await act(use, task)
            record = {"message_id": task.message_id, "queue": task.queue, "status": word}
            return record, f"{safe(task.message_id)} {word}"

        await on_each(session, names, one)
