"""Deliveries as operators see them."""

from __future__ import annotations

import sqlite3
from typing import Any

from ackbone.core.delivery_desk import DeliveryFilter, DeliveryRecord
from ackbone.store.delivery_desk import record_of
from ackbone.store.parcel_rows import PAUSED

_RECORD = (
    "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, conversation,"
    " priority, status, retry_count, max_retries, calls, resent, in_doubt, receipts, options,"
    " due_at, created_at, expires_at, last_attempt_at, last_error FROM deliveries"
)
_FILTER = (
    " WHERE (?1 IS NULL OR status = ?1) AND (?2 IS NULL OR channel = ?2)"
    " AND (?3 IS NULL OR tenant_id = ?3) AND (?4 IS NULL OR created_at >= ?4)"
)


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
