"""Parked tasks: taken up again, or ended, each by a compare-and-set on `parked`."""

from __future__ import annotations

import sqlite3
from typing import Any

from holdfast.core import events
from holdfast.core.errors import Conflict, NotFound
from holdfast.core.outcome import Status
from holdfast.core.text import storable
from holdfast.store.letter import Letter
from holdfast.store.outcomes import final_data
from holdfast.store.stored import decode_history

from .keys import free_key, resolve_key
from .lanes import advance_lane
from .ledger import Entry
from .letters import bury

TASK = " WHERE tenant_id = ? AND subscription = ? AND message_id = ?"
Identity = tuple[str, str, str]
"""tenant_id, subscription, message_id"""


def parked_kind(conn: sqlite3.Connection, identity: Identity) -> str | None:
    """Why it is parked. Raises NotFound, or Conflict if it is not."""
    found = conn.execute(
        f"SELECT status, parked_kind FROM queue_executions{TASK}", identity
    ).fetchone()
    if found is None:
        raise NotFound(f"there is no message {identity[2]}")
    if found[0] != Status.PARKED:
        raise Conflict(f"message {identity[2]} is not parked, it is {found[0]}")
    kind: str | None = found[1]
    return kind


def resume(conn: sqlite3.Connection, identity: Identity, *, by: str, now_us: int) -> Entry:
    """It is ready; no attempt is spent. Raises NotFound or Conflict."""
    kind = parked_kind(conn, identity)
    conn.execute(
        "UPDATE queue_executions SET status = 'ready', due_at = ?, parked_kind = NULL"
        f"{TASK} AND status = 'parked'",
        (now_us, *identity),
    )
    return (*identity, events.RESUMED, {"kind": kind, "by": by})


def end(
    conn: sqlite3.Connection,
    identity: Identity,
    status: Status,
    *,
    reason: str,
    data: dict[str, Any],
    keep_letter: bool,
    now_us: int,
) -> list[Entry]:
    """It is over; its key and its conversation are free. Raises NotFound or Conflict.

    `keep_letter`: it is kept as a dead letter, too, under the word of its status.
    """
    parked_kind(conn, identity)
    tenant_id, subscription, message_id = identity
    queue, type_, trace_id, key, lane, retries, history, body, info = conn.execute(
        "SELECT queue_name, event_name, trace_id, idem_key, lane, retry_count, history, body,"
        f" body_info FROM queue_executions{TASK}",
        identity,
    ).fetchone()
    conn.execute(
        "UPDATE queue_executions SET status = ?, completed_at = ?, error_message = ?, body = NULL"
        f"{TASK} AND status = 'parked'",
        (status.value, now_us, storable(reason), *identity),
    )
    final = final_data(queue, tenant_id, message_id, type_, trace_id, status)
    final.update(reason=storable(reason), **data)
    entries: list[Entry] = [(*identity, events.EVENT_OF_STATUS[status], final)]
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
        entries.append(bury(conn, letter, now_us))
    if key is not None:
        free_key(conn, tenant_id, subscription, key, message_id)
        entries += resolve_key(conn, tenant_id, subscription, key, now_us)
    if lane is not None:
        advance_lane(conn, tenant_id, subscription, lane, now_us)
    return entries
