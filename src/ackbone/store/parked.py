"""Parked messages are taken up again or ended, each by a compare-and-set on `parked`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.errors import Conflict, NotFound
from ackbone.core.outcome import NO_HANDLER, Status
from ackbone.core.text import storable

from .outcomes import TaskRow, bury
from .tasks import decode_history
from .unit import WORK, Change, Identity, Row, Tx


async def parked_kind(tx: Tx, identity: Identity) -> str | None:
    """Why it is parked; nobody else moves it now. Raises NotFound, or Conflict if it is not."""
    found = await tx.rows(tx.sql.operations.task_state, *identity)
    if not found:
        raise NotFound(f"there is no message {identity[2]}")
    status, kind = found[0]
    if status != Status.PARKED:
        raise Conflict(f"message {identity[2]} is not parked, it is {status}")
    return None if kind is None else str(kind)


async def resume(tx: Tx, change: Change, identity: Identity, *, by: str) -> None:
    """It is ready; no attempt is spent. Raises NotFound or Conflict."""
    kind = await parked_kind(tx, identity)
    await tx.send(tx.sql.operations.resume, *identity, await tx.moment())
    change.entries.append((*identity, events.RESUMED, {"kind": kind, "by": by}))
    change.topics.add(WORK)


async def resume_for_handler(
    tx: Tx, change: Change, kind: str, subscription: str, types: Sequence[str]
) -> int:
    """All that waited for a handler that is there now ("*": for any); returns how many."""
    asked = waits_for_handler(kind, subscription, types)
    found = await tx.rows(tx.sql.operations.handler_came, *asked, await tx.moment())
    return _resumed(change, found, {"kind": kind, "by": "handler"})


def waits_for_handler(kind: str, subscription: str, types: Sequence[str]) -> tuple[Any, ...]:
    """The parameters of `wait_for_handler`."""
    return kind, subscription, NO_HANDLER, "*" in types, list(types)


async def resume_for_effect(tx: Tx, change: Change) -> int:
    """All that waited for an effect whose result is recorded by now; returns how many."""
    found = await tx.rows(tx.sql.operations.effect_known, await tx.moment())
    return _resumed(change, found, {"kind": "effect_unknown", "by": "effect"})


def _resumed(change: Change, found: Sequence[Row], data: dict[str, str]) -> int:
    change.entries += [(*identity, events.RESUMED, data) for identity in found]
    if found:
        change.topics.add(WORK)
    return len(found)


async def end(
    tx: Tx,
    change: Change,
    identity: Identity,
    status: Status,
    *,
    reason: str,
    data: dict[str, Any],
    keep_letter: bool,
) -> None:
    """It is over; its key and its conversation are free. Raises NotFound or Conflict.

    `keep_letter`: it is kept as a dead letter, too, under the word of its status.
    """
    await parked_kind(tx, identity)
    now_us = await tx.moment()
    ((queue, type_, trace_id, key, lane, retries, history, body, info),) = await tx.rows(
        tx.sql.operations.parked_task, *identity
    )
    await tx.send(tx.sql.operations.end_parked, *identity, status.value, storable(reason), now_us)
    task = TaskRow(*identity, queue, type_, trace_id)
    change.entries.append(task.final(status, reason=storable(reason), **data))
    if keep_letter:
        letter = task.letter(
            status.value,
            reason,
            retry_count=retries or 0,
            history=decode_history(history),
            body=body,
            body_info=info,
        )
        change.entries.append(bury(tx, letter, now_us))
    task.let_go(tx, change, key, lane)
    change.topics.add(WORK)
