"""Parked tasks: taken up again, or ended, each by a compare-and-set on `parked`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core import events
from holdfast.core.errors import Conflict, NotFound
from holdfast.core.outcome import Status
from holdfast.core.text import storable
from holdfast.store.letter import Letter
from holdfast.store.outcomes import final_data
from holdfast.store.stored import KNOWN_EFFECT, decode_history

from .change import Change
from .database import Tx
from .keys import free_keys
from .letters import bury
from .tasks import BEGUN, PK, Identity
from .wake import WORK

_KIND = f"SELECT status, parked_kind FROM queue_executions WHERE {PK} FOR UPDATE"
_RESUME = (
    f"UPDATE queue_executions SET status = 'ready', due_at = {BEGUN}, parked_kind = NULL"
    f" WHERE {PK} AND status = 'parked'"
)
_WAITING_FOR_HANDLER = (
    " WHERE status = 'parked' AND parked_kind = $1 AND subscription = $2"
    " AND error_message LIKE $3 AND ($4::bool OR event_name = ANY($5::text[]))"
)
FOR_A_HANDLER = f"SELECT 1 FROM queue_executions{_WAITING_FOR_HANDLER} LIMIT 1"
_HANDLER_CAME = (
    f"UPDATE queue_executions SET status = 'ready', due_at = {BEGUN},"
    f" parked_kind = NULL{_WAITING_FOR_HANDLER} RETURNING tenant_id, subscription, message_id"
)
KNOWN = f"SELECT 1 FROM queue_executions q WHERE {KNOWN_EFFECT} LIMIT 1"
_EFFECT_KNOWN = (
    f"UPDATE queue_executions q SET status = 'ready', due_at = {BEGUN},"
    f" parked_kind = NULL WHERE {KNOWN_EFFECT} RETURNING tenant_id, subscription, message_id"
)
_END = (
    "UPDATE queue_executions q SET status = $4, completed_at = clock_timestamp(),"
    f" error_message = $5, body = NULL FROM (SELECT * FROM queue_executions WHERE {PK}) o"
    " WHERE q.tenant_id = o.tenant_id AND q.subscription = o.subscription"
    " AND q.message_id = o.message_id AND q.status = 'parked'"
    " RETURNING o.queue_name, o.event_name, o.trace_id, o.idem_key, o.lane, o.retry_count,"
    " o.history::text, o.body, o.body_info::text"
)


async def parked_kind(tx: Tx, identity: Identity) -> str | None:
    """Why it is parked; nobody else moves it now. Raises NotFound, or Conflict if it is not."""
    found = await tx.rows(_KIND, *identity)
    if not found:
        raise NotFound(f"there is no message {identity[2]}")
    status, kind = found[0]
    if status != Status.PARKED:
        raise Conflict(f"message {identity[2]} is not parked, it is {status}")
    return None if kind is None else str(kind)


async def resume(tx: Tx, change: Change, identity: Identity, *, by: str) -> None:
    """It is ready; no attempt is spent. Raises NotFound or Conflict."""
    kind = await parked_kind(tx, identity)
    await tx.send(_RESUME, *identity)
    change.entries.append((*identity, events.RESUMED, {"kind": kind, "by": by}))
    change.topics.add(WORK)


async def handler_came(tx: Tx, change: Change, kind: str, asked: Sequence[Any]) -> int:
    """All that waited for a handler that is there now; `asked` as for `FOR_A_HANDLER`."""
    found = await tx.rows(_HANDLER_CAME, *asked)
    data = {"kind": kind, "by": "handler"}
    change.entries += [(*identity, events.RESUMED, data) for identity in found]
    if found:
        change.topics.add(WORK)
    return len(found)


async def effect_known(tx: Tx, change: Change) -> int:
    """All that waited for an effect whose result is recorded by now."""
    found = await tx.rows(_EFFECT_KNOWN)
    data = {"kind": "effect_unknown", "by": "effect"}
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
    ((queue, type_, trace_id, key, lane, retries, history, body, info),) = await tx.rows(
        _END, *identity, status.value, storable(reason)
    )
    tenant_id, subscription, message_id = identity
    final = final_data(queue, tenant_id, message_id, type_, trace_id, status)
    final.update(reason=storable(reason), **data)
    change.entries.append((*identity, events.EVENT_OF_STATUS[status], final))
    if keep_letter:
        letter = Letter(
            tenant_id=tenant_id,
            subscription=subscription,
            message_id=message_id,
            queue=queue,
            event_name=type_,
            reason=status.value,
            error=reason,
            retry_count=retries or 0,
            history=decode_history(history),
            body=body,
            body_info=info,
        )
        change.entries.append(bury(tx, letter, await tx.moment()))
    if key is not None:
        free_keys(tx, [((tenant_id, subscription, key), message_id)])
    change.let_go(tenant_id, subscription, key, lane)
    change.topics.add(WORK)
