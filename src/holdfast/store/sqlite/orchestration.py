"""Tasks as an orchestrator has to do with them: cancelled, or ended by somebody else's worker."""

from __future__ import annotations

import sqlite3
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

from . import approvals
from .keys import free_key, resolve_key
from .lanes import advance_lane
from .ledger import Entry
from .notices import Identity

_TASK = " WHERE tenant_id = ? AND subscription = ? AND message_id = ?"
_NEW = (
    "INSERT OR IGNORE INTO queue_executions (id, tenant_id, subscription, message_id, queue_name,"
    " event_name, status, held, worker_id, started_at, completed_at, error_message, retry_count,"
    " idem_key, result) VALUES (?, ?, ?, ?, ?, ?, ?, 'store', ?, ?, ?, ?, ?, ?, ?)"
)
"""A task that ended without having been here. It has no body hash: any copy that comes is it."""
_CREATED = (
    "SELECT 1 FROM event_log WHERE tenant_id = ? AND subscription = ? AND task_id = ?"
    " AND event_type = 'task.created'"
)


def submitted(conn: sqlite3.Connection, subscription: str, tasks: Sequence[Message]) -> list[Entry]:
    """See `Operations.submitted`."""
    named = {(task.tenant_id, subscription, task.id): task for task in tasks}
    return [
        task_created(*identity, task.type, to_us(task.created_at))
        for identity, task in named.items()
        if not _is_created(conn, identity)
    ]


def _is_created(conn: sqlite3.Connection, identity: Identity) -> bool:
    return conn.execute(_CREATED, identity).fetchone() is not None


def cancel(
    conn: sqlite3.Connection, identity: Identity, queue: str, why: Mapping[str, Any], now_us: int
) -> tuple[Cancelled, list[Entry]]:
    """See `Operations.cancel`; returns the events to append, too."""
    found = conn.execute(f"SELECT status FROM queue_executions{_TASK}", identity).fetchone()
    if found is None:
        return Cancelled.ENDED, _never(conn, identity, queue, why, now_us)
    if found[0] in FINAL:
        return Cancelled.OVER, []
    if found[0] == Status.RUNNING:
        conn.execute(
            f"UPDATE queue_executions SET cancel_at = ?{_TASK} AND status = 'running'",
            (now_us, *identity),
        )
        return Cancelled.ASKED, [(*identity, events.CANCEL_ASKED, dict(why))]
    return Cancelled.ENDED, _discard(conn, identity, why, now_us)


def _never(
    conn: sqlite3.Connection, identity: Identity, queue: str, why: Mapping[str, Any], now_us: int
) -> list[Entry]:
    """It waits at its broker: its copy will find it ended."""
    error = str(why["reason"])
    ended = (Status.DISCARDED.value, None, now_us, now_us, error, 0, None, None)
    conn.execute(_NEW, (uuid7_bytes(), *identity, queue, None, *ended))
    tenant_id, _, message_id = identity
    data = final_data(queue, tenant_id, message_id, None, None, Status.DISCARDED)
    return [(*identity, events.DISCARDED, {**data, **why})]


def _discard(
    conn: sqlite3.Connection, identity: Identity, why: Mapping[str, Any], now_us: int
) -> list[Entry]:
    queue, event_name, trace_id, key, lane = conn.execute(
        "UPDATE queue_executions SET status = 'discarded', completed_at = ?, error_message = ?,"
        f" body = NULL, due_at = NULL{_TASK}"
        " RETURNING queue_name, event_name, trace_id, idem_key, lane",
        (now_us, str(why["reason"]), *identity),
    ).fetchone()
    withdrawn = approvals.withdraw(conn, identity, by=str(why["by"]), now_us=now_us)
    tenant_id, subscription, message_id = identity
    data = final_data(queue, tenant_id, message_id, event_name, trace_id, Status.DISCARDED)
    entries: list[Entry] = [*withdrawn, (*identity, events.DISCARDED, {**data, **why})]
    if key is not None:
        free_key(conn, tenant_id, subscription, key, message_id)
        entries += resolve_key(conn, tenant_id, subscription, key, now_us)
    if lane is not None:
        advance_lane(conn, tenant_id, subscription, lane, now_us)
    return entries


def record(
    conn: sqlite3.Connection, ends: Sequence[End], worker_id: int, now_us: int
) -> list[Entry]:
    """Rows and final events of ends that nobody here knows of."""
    entries: list[Entry] = []
    for end in ends:
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
        queue = end.subscription
        tool = end.tool_name or None
        if conn.execute(_NEW, (uuid7_bytes(), *identity, queue, tool, *values)).rowcount != 1:
            continue
        entries += recorded(end, is_created=_is_created(conn, identity))
    return entries
