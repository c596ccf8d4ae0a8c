"""Tasks as an orchestrator has to do with them: cancelled, or ended by somebody else's worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core import events
from holdfast.core.clock import to_us
from holdfast.core.ids import uuid7_bytes
from holdfast.core.message import Message
from holdfast.core.notices import End
from holdfast.core.outcome import FINAL, Status
from holdfast.core.records import Cancelled
from holdfast.core.text import storable
from holdfast.store.claimed import task_created
from holdfast.store.outcomes import final_data, recorded

from . import approvals, arrays
from .arrays import moment
from .change import Change
from .database import Tx
from .keys import free_keys
from .tasks import PK, Identity, row_uuid
from .wake import WORK

_STATUS = f"SELECT status FROM queue_executions WHERE {PK} FOR UPDATE"
_NEW = (
    "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name, event_name,"
    " status, held, worker_id, started_at, completed_at, error_message, retry_count, idem_key,"
    " result) VALUES ($1::uuid, $2, $3, $4, $5, $6, $7, 'store', $8::bigint, clock_timestamp(),"
    f" {moment('$9::bigint')}, $10, $11::int, $12, $13::bytea)"
    " ON CONFLICT (tenant_id, subscription, message_id) DO NOTHING RETURNING 1"
)
"""A task that ended without having been here. It has no body hash: any copy that comes is it."""
_CREATED = (
    "SELECT DISTINCT e.tenant_id, e.subscription, e.task_id"
    " FROM unnest($1::text[], $2::text[], $3::text[]) t(tenant_id, subscription, task_id)"
    " JOIN event_log e ON e.tenant_id = t.tenant_id AND e.task_id = t.task_id"
    " AND e.subscription = t.subscription AND e.event_type = 'task.created'"
)
_ASK = (
    f"UPDATE queue_executions SET cancel_at = clock_timestamp() WHERE {PK} AND status = 'running'"
)
_DISCARD = (
    "UPDATE queue_executions SET status = 'discarded', completed_at = clock_timestamp(),"
    f" error_message = $4, body = NULL, due_at = NULL WHERE {PK}"
    " RETURNING queue_name, event_name, trace_id, idem_key, lane"
)


async def submitted(tx: Tx, change: Change, subscription: str, tasks: Sequence[Message]) -> None:
    """See `Operations.submitted`."""
    named = {(task.tenant_id, subscription, task.id): task for task in tasks}
    known = await _created(tx, list(named))
    change.entries += [
        task_created(*identity, task.type, to_us(task.created_at))
        for identity, task in named.items()
        if identity not in known
    ]


async def _created(tx: Tx, tasks: Sequence[Identity]) -> set[Identity]:
    """Those of these tasks that have a `task.created` already."""
    columns = [arrays.texts([task[n] for task in tasks]) for n in range(3)]
    return {(row[0], row[1], row[2]) for row in await tx.rows(_CREATED, *columns)}


async def cancel(
    tx: Tx, change: Change, identity: Identity, queue: str, why: Mapping[str, Any]
) -> Cancelled:
    """See `Operations.cancel`."""
    found = await tx.rows(_STATUS, *identity)
    if not found and await _never(tx, change, identity, queue, why):
        return Cancelled.ENDED
    if not found:  # it came just now
        found = await tx.rows(_STATUS, *identity)
    status = found[0][0]
    if status in FINAL:
        return Cancelled.OVER
    change.topics.add(WORK)
    if status == Status.RUNNING:
        await tx.send(_ASK, *identity)
        change.entries.append((*identity, events.CANCEL_ASKED, dict(why)))
        return Cancelled.ASKED
    await _discard(tx, change, identity, why)
    return Cancelled.ENDED


async def _never(
    tx: Tx, change: Change, identity: Identity, queue: str, why: Mapping[str, Any]
) -> bool:
    """It waits at its broker: its copy will find it ended. False: it has come meanwhile."""
    now_us = await tx.moment()
    ended = (Status.DISCARDED.value, None, str(now_us), str(why["reason"]), "0", None, None)
    new = await tx.rows(_NEW, row_uuid(uuid7_bytes()), *identity, queue, None, *ended)
    if new:
        tenant_id, _, message_id = identity
        data = final_data(queue, tenant_id, message_id, None, None, Status.DISCARDED)
        change.entries.append((*identity, events.DISCARDED, {**data, **why}))
    return bool(new)


async def _discard(tx: Tx, change: Change, identity: Identity, why: Mapping[str, Any]) -> None:
    ((queue, event_name, trace_id, key, lane),) = await tx.rows(
        _DISCARD, *identity, str(why["reason"])
    )
    await approvals.withdraw(tx, change, identity, by=str(why["by"]))
    tenant_id, subscription, message_id = identity
    data = final_data(queue, tenant_id, message_id, event_name, trace_id, Status.DISCARDED)
    change.entries.append((*identity, events.DISCARDED, {**data, **why}))
    if key is not None:
        free_keys(tx, [((tenant_id, subscription, key), message_id)])
    change.let_go(tenant_id, subscription, key, lane)


async def record(tx: Tx, change: Change, ends: Sequence[End], worker_id: int) -> int:
    """Rows and final events of ends that nobody here knows of; returns how many they were.

    They were told by whoever ran them: nobody is told again.
    """
    new = 0
    known = await _created(tx, [(end.tenant_id, end.subscription, end.task_id) for end in ends])
    for end in sorted(ends, key=lambda each: (each.tenant_id, each.subscription, each.task_id)):
        identity = (end.tenant_id, end.subscription, end.task_id)
        values = (
            end.status.value,
            str(worker_id),
            str(end.finished_at_us),
            storable(end.error) or None,
            str(end.retry_count),
            end.idempotency_key,
            end.result,
        )
        named = (*identity, end.subscription, end.tool_name or None)
        if not await tx.rows(_NEW, row_uuid(uuid7_bytes()), *named, *values):
            continue
        new += 1
        change.entries += recorded(end, is_created=identity in known)
        change.told.add(identity)
    return new
