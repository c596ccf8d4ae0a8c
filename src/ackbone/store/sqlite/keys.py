"""Idempotency keys: a key belongs to one message until that message is final (P4)."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from ackbone.core import events
from ackbone.core.outcome import Status
from ackbone.sqlite import rows
from ackbone.store.outcomes import final_data

from .claiming import Claiming
from .lanes import advance_lane
from .ledger import Entry

_TAKE = (
    "INSERT OR IGNORE INTO idempotency_keys (subscription, state, created_at, tenant_id, key,"
    " message_id)"
)
_TAKE_ALIKE = (0,)
"""Tenant: a place in what `take_keys` is given."""
_KEEP_ALIKE = (1, 2, 3)
"""End of the window, tenant and subscription: places in what `keep_results` is given."""
_ONE = " WHERE tenant_id = ? AND subscription = ? AND key = ?"


class Holder(NamedTuple):
    """Whose key it is."""

    message_id: str
    state: str
    value: bytes | None


def take_keys(
    claim: Claiming, wanted: Sequence[tuple[str, str, str]]
) -> dict[tuple[str, str], Holder]:
    """Take (tenant, key, message) keys; returns the lost ones by (tenant, message)."""
    conn, name = claim.conn, claim.sub.name
    lost: dict[tuple[str, str], Holder] = {}
    if not wanted:
        return lost
    shared = (name, "running", claim.now_us)
    inserted = rows.insert(conn, _TAKE, wanted, shared=shared, alike=_TAKE_ALIKE)
    if inserted == len(wanted):
        return lost
    for tenant, key, message_id in wanted:
        holder, state, value, expires = conn.execute(
            f"SELECT message_id, state, value, expires_at FROM idempotency_keys{_ONE}",
            (tenant, name, key),
        ).fetchone()
        if holder == message_id:
            continue
        if state == "done" and expires is not None and expires <= claim.expiry_us:
            conn.execute(
                "UPDATE idempotency_keys SET message_id = ?, state = 'running', value = NULL,"
                f" expires_at = NULL{_ONE}",
                (message_id, tenant, name, key),
            )
            continue
        lost[(tenant, message_id)] = Holder(holder, state, value)
    return lost


def _keep_statement(values: str) -> str:
    return (
        "UPDATE idempotency_keys SET state = 'done', value = u.column1, expires_at = u.column2"
        f" FROM (VALUES {values}) u WHERE tenant_id = u.column3 AND subscription = u.column4"
        " AND key = u.column5 AND message_id = u.column6"
    )


def keep_results(conn: sqlite3.Connection, done: Sequence[tuple[Any, ...]]) -> None:
    """Keys that are done: duplicates get the result until it expires.

    Each one is (value, expires_us, tenant, subscription, key, message).
    """
    rows.update(conn, _keep_statement, done, alike=_KEEP_ALIKE)


def someone_waits(conn: sqlite3.Connection) -> bool:
    """Does any message wait for a key?"""
    found = conn.execute("SELECT 1 FROM queue_executions WHERE status = 'waiting_key' LIMIT 1")
    return found.fetchone() is not None


def free_key(
    conn: sqlite3.Connection, tenant_id: str, subscription: str, key: str | None, message_id: str
) -> None:
    """A message that ended badly gives its key back."""
    if key is not None:
        conn.execute(
            f"DELETE FROM idempotency_keys{_ONE} AND message_id = ?",
            (tenant_id, subscription, key, message_id),
        )


def is_free(conn: sqlite3.Connection, tenant_id: str, subscription: str, key: str) -> bool:
    """Does the key belong to nobody?"""
    found = conn.execute(
        f"SELECT 1 FROM idempotency_keys{_ONE}", (tenant_id, subscription, key)
    ).fetchone()
    return found is None


def resolve_key(
    conn: sqlite3.Connection, tenant_id: str, subscription: str, key: str, now_us: int
) -> list[Entry]:
    """Those who wait for this key: duplicates if it is done, the oldest is next if it is free."""
    waiting = conn.execute(
        "SELECT rowid, message_id, queue_name, event_name, trace_id FROM queue_executions"
        " WHERE tenant_id = ? AND subscription = ? AND idem_key = ? AND status = 'waiting_key'"
        " ORDER BY rowid",
        (tenant_id, subscription, key),
    ).fetchall()
    if not waiting:
        return []
    found = conn.execute(
        f"SELECT message_id, state, value FROM idempotency_keys{_ONE}",
        (tenant_id, subscription, key),
    ).fetchone()
    if found is None:
        conn.execute(
            "UPDATE queue_executions SET status = 'ready', due_at = ? WHERE rowid = ?",
            (now_us, waiting[0][0]),
        )
        return []
    holder = Holder(*found)
    if holder.state != "done":
        return []
    return [
        end_as_duplicate(
            conn,
            rowid,
            holder,
            now_us,
            (tenant_id, subscription, message_id),
            final_data(queue, tenant_id, message_id, event_name, trace_id, Status.DUPLICATE),
        )
        for rowid, message_id, queue, event_name, trace_id in waiting
    ]


def end_as_duplicate(
    conn: sqlite3.Connection,
    rowid: int,
    holder: Holder,
    now_us: int,
    identity: tuple[str, str, str],
    data: dict[str, Any],
) -> Entry:
    """End a task as duplicate, with the first one's result; its conversation goes on."""
    (lane,) = conn.execute(
        "UPDATE queue_executions SET status = 'duplicate', completed_at = ?, result = ?,"
        " body = NULL, body_info = NULL WHERE rowid = ? RETURNING lane",
        (now_us, holder.value, rowid),
    ).fetchone()
    data["first_id"] = holder.message_id
    tenant_id, subscription, message_id = identity
    if lane is not None:
        advance_lane(conn, tenant_id, subscription, lane, now_us)
    return tenant_id, subscription, message_id, events.DUPLICATE, data
