"""Replies as operators see them, and what operators do to them, inside the caller's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.core import events
from holdfast.core.delivery_desk import DeliveryFilter, DeliveryRecord, refusal
from holdfast.core.errors import HoldfastError
from holdfast.core.message import DEFAULT_TENANT
from holdfast.core.text import storable
from holdfast.store.delivery_desk import (
    AGREES,
    CHANGED_IN,
    RETRIED_FROM,
    pause_role,
    record_of,
)
from holdfast.store.parcel_rows import PAUSED

from .delivery_rows import promote
from .ledger import Entry

_RECORD = (
    "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, conversation,"
    " priority, status, retry_count, max_retries, calls, resent, in_doubt, receipts, options,"
    " due_at, created_at, expires_at, last_attempt_at, last_error FROM deliveries"
)
_FILTER = (
    " WHERE (?1 IS NULL OR status = ?1) AND (?2 IS NULL OR channel = ?2)"
    " AND (?3 IS NULL OR tenant_id = ?3) AND (?4 IS NULL OR created_at >= ?4)"
)
_TOLD = " RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), channel, lane"
_RETRY = (
    "UPDATE deliveries SET status = 'pending', due_at = ?2, retry_count = 0,"
    f" last_attempt_at = NULL, expires_at = NULL, {AGREES} WHERE id = ?1 AND {RETRIED_FROM}{_TOLD}"
)
_EDIT = (
    f"UPDATE deliveries SET content = ?2 WHERE id = ?1 AND receipts IS NULL AND {CHANGED_IN}{_TOLD}"
)
_DISCARD = (
    f"UPDATE deliveries SET status = 'discarded', due_at = ?2 WHERE id = ?1 AND {CHANGED_IN}{_TOLD}"
)


# -- looking --------------------------------------------------------------------------------------


def listed(conn: sqlite3.Connection, where: DeliveryFilter, limit: int) -> list[DeliveryRecord]:
    found = conn.execute(
        f"{_RECORD}{_FILTER} ORDER BY rowid DESC LIMIT ?5", (*_values(where), limit)
    )
    return [record_of(row) for row in found]


def ids(conn: sqlite3.Connection, where: DeliveryFilter, limit: int | None) -> list[str]:
    found = conn.execute(
        f"SELECT id FROM deliveries{_FILTER} ORDER BY rowid LIMIT ?5",
        (*_values(where), -1 if limit is None else limit),
    )
    return [delivery_id for (delivery_id,) in found]


def named(
    conn: sqlite3.Connection, name: str, tenant_id: str | None, limit: int
) -> list[DeliveryRecord]:
    of_tenant = " AND (?2 IS NULL OR tenant_id = ?2) ORDER BY id LIMIT ?3"
    exact = conn.execute(f"{_RECORD} WHERE id = ?1{of_tenant}", (name, tenant_id, limit)).fetchall()
    found = exact or conn.execute(
        f"{_RECORD} WHERE id >= ?1 AND substr(id, 1, length(?1)) = ?1{of_tenant}",
        (name, tenant_id, limit),
    )
    return [record_of(row) for row in found]


def paused(conn: sqlite3.Connection) -> frozenset[str]:
    found = conn.execute("SELECT role FROM roles WHERE role GLOB ?", (f"{PAUSED}*",))
    return frozenset(role.removeprefix(PAUSED) for (role,) in found)


def _values(where: DeliveryFilter) -> tuple[Any, ...]:
    return where.status, where.channel, where.tenant_id, where.since_us


# -- acting ---------------------------------------------------------------------------------------


def retry(conn: sqlite3.Connection, delivery_id: str, by: str, now_us: int) -> Entry:
    """Raises NotFound or Conflict, as the other acts do."""
    told, _ = _change(conn, _RETRY, delivery_id, now_us, "sent again")
    return told(events.DELIVERY_RETRIED, {"by": by})


def edit(conn: sqlite3.Connection, delivery_id: str, content: str, by: str) -> Entry:
    text = content.encode("utf-8", "backslashreplace").decode()
    told, _ = _change(conn, _EDIT, delivery_id, text, "edited")
    return told(events.DELIVERY_EDITED, {"by": by})


def discard(conn: sqlite3.Connection, delivery_id: str, reason: str, by: str, now_us: int) -> Entry:
    told, lane = _change(conn, _DISCARD, delivery_id, now_us, "discarded")
    promote(conn, [lane], now_us)
    return told(events.DELIVERY_DISCARDED, {"reason": storable(reason), "by": by})


def set_paused(conn: sqlite3.Connection, channel: str, by: str, *, on: bool) -> Entry | None:
    """None: it was so before."""
    role = pause_role(channel)
    if on:
        changed = conn.execute("INSERT OR IGNORE INTO roles (role) VALUES (?)", (role,)).rowcount
    else:
        changed = conn.execute("DELETE FROM roles WHERE role = ?", (role,)).rowcount
    if not changed:
        return None
    kind = events.DELIVERY_PAUSED if on else events.DELIVERY_RESUMED
    # An act on a channel belongs to no message, and to no queue.
    return DEFAULT_TENANT, "", "", kind, {"channel": channel, "by": by}


def each(
    found: Sequence[str], act: Callable[[str], Entry]
) -> tuple[list[HoldfastError | None], list[Entry]]:
    """One answer per item: one that cannot be helped does not stop the others."""
    answers: list[HoldfastError | None] = []
    entries: list[Entry] = []
    for delivery_id in found:
        try:
            entries.append(act(delivery_id))
            answers.append(None)
        except HoldfastError as error:
            answers.append(error)
    return answers, entries


def _change(
    conn: sqlite3.Connection, statement: str, delivery_id: str, value: Any, verb: str
) -> tuple[Callable[[str, dict[str, Any]], Entry], str | None]:
    found = conn.execute(statement, (delivery_id, value)).fetchone()
    if found is None:
        state = conn.execute(
            "SELECT status, receipts IS NOT NULL FROM deliveries WHERE id = ?", (delivery_id,)
        ).fetchone()
        raise refusal(delivery_id, state, verb)
    tenant_id, subscription, task_id, channel, lane = found

    def told(kind: str, data: dict[str, Any]) -> Entry:
        named = {"delivery_id": delivery_id, "channel": channel, **data}
        return tenant_id, subscription, task_id, kind, named

    return told, lane
