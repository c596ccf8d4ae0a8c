"""Tasks as an orchestrator has to do with them: cancelled, or ended by somebody else's worker."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.clock import to_us
from ackbone.core.ids import uuid7_bytes
from ackbone.core.message import Message
from ackbone.core.notices import End
from ackbone.core.outcome import FINAL, Status
from ackbone.core.records import Cancelled
from ackbone.core.text import storable

from . import parked
from .outcomes import TaskRow, recorded
from .task_protocol import task_created
from .unit import WORK, Change, Identity, Tx


async def submitted(tx: Tx, change: Change, subscription: str, tasks: Sequence[Message]) -> None:
    """See `Operations.submitted`."""
    for identity, task in {(t.tenant_id, subscription, t.id): t for t in tasks}.items():
        if not await _is_created(tx, identity):
            change.entries.append(task_created(*identity, task.type, to_us(task.created_at)))


async def _is_created(tx: Tx, identity: Identity) -> bool:
    return bool(await tx.rows(tx.sql.operations.created, *identity))


async def cancel(
    tx: Tx, change: Change, identity: Identity, queue: str, why: Mapping[str, Any]
) -> Cancelled:
    """See `Operations.cancel`."""
    found = await tx.rows(tx.sql.operations.task_state, *identity)
    if not found and await _end_before_it_comes(tx, change, identity, queue, why):
        return Cancelled.ENDED
    if not found:  # it came just now
        found = await tx.rows(tx.sql.operations.task_state, *identity)
    status = found[0][0]
    if status in FINAL:
        return Cancelled.OVER
    change.topics.add(WORK)
    if status == Status.RUNNING:
        await tx.send(tx.sql.operations.ask_to_cancel, *identity, await tx.moment())
        change.entries.append((*identity, events.CANCEL_ASKED, dict(why)))
        return Cancelled.ASKED
    await _discard(tx, change, identity, why)
    return Cancelled.ENDED


async def _end_before_it_comes(
    tx: Tx, change: Change, identity: Identity, queue: str, why: Mapping[str, Any]
) -> bool:
    """It waits at its broker: its copy will find it ended. False: it has come meanwhile."""
    now_us = await tx.moment()
    reason = str(why["reason"])
    ended = (Status.DISCARDED.value, None, now_us, now_us, reason, 0, None, None)
    if not await tx.rows(tx.sql.operations.record_task, _new_id(), *identity, queue, None, *ended):
        return False
    task = TaskRow(*identity, queue, None, None)
    change.entries.append(task.final(Status.DISCARDED, **why))
    return True


async def _discard(tx: Tx, change: Change, identity: Identity, why: Mapping[str, Any]) -> None:
    ((queue, event_name, trace_id, key, lane),) = await tx.rows(
        tx.sql.operations.discard_task, *identity, str(why["reason"]), await tx.moment()
    )
    await parked.withdraw(tx, change, identity, by=str(why["by"]))
    task = TaskRow(*identity, queue, event_name, trace_id)
    change.entries.append(task.final(Status.DISCARDED, **why))
    task.let_go(tx, change, key, lane)


async def record(tx: Tx, change: Change, ends: Sequence[End], worker_id: int) -> int:
    """Rows and final events of ends that nobody here knows of; returns how many they were.

    The worker that ran them has published their ends, so no notice is written here.
    """
    new = 0
    now_us = await tx.moment()
    # Sorted: two that record the same ends lock their rows in one order.
    for end in sorted(ends, key=lambda each: (each.tenant_id, each.subscription, each.task_id)):
        identity = (end.tenant_id, end.subscription, end.task_id)
        values = (
            end.status.value,
            worker_id,
            now_us,
            end.finished_at_us,
            storable(end.error) or None,
            end.retry_count,
            end.idempotency_key,
            end.result,
        )
        named = (*identity, end.subscription, end.tool_name or None)
        if await tx.rows(tx.sql.operations.record_task, _new_id(), *named, *values):
            new += 1
            change.entries += recorded(end, is_created=await _is_created(tx, identity))
            change.told.add(identity)
    return new


def _new_id() -> str:
    return str(uuid.UUID(bytes=uuid7_bytes()))
