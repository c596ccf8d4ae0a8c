"""Deliveries as operators see them."""

from __future__ import annotations

from ackbone.core.delivery_desk import DeliveryFilter, DeliveryRecord
from ackbone.store.delivery_desk import record_of
from ackbone.store.parcel_rows import PAUSED

from .arrays import moment
from .delivery_rows import Rows
from .views import us

_RECORD = (
    "SELECT id, tenant_id, subscription, task_id, channel, recipient, content, conversation,"
    " priority, status, retry_count, max_retries, calls, resent, in_doubt, receipts::text,"
    f" options::text, {us('due_at')}, {us('created_at')}, {us('expires_at')},"
    f" {us('last_attempt_at')}, last_error FROM deliveries"
)
_FILTER = (
    " WHERE ($1::text IS NULL OR status = $1) AND ($2::text IS NULL OR channel = $2)"
    " AND ($3::text IS NULL OR tenant_id = $3)"
    f" AND ($4::bigint IS NULL OR created_at >= {moment('$4::bigint')})"
)
_OF_TENANT = " AND ($2::text IS NULL OR tenant_id = $2) ORDER BY id LIMIT $3::int"
_PAUSED = "SELECT role FROM roles WHERE starts_with(role, $1)"


async def listed(rows: Rows, where: DeliveryFilter, limit: int) -> list[DeliveryRecord]:
    statement = f"{_RECORD}{_FILTER} ORDER BY seq DESC LIMIT $5::int"
    return [record_of(row) for row in await rows(statement, *_values(where), str(limit))]


async def ids(rows: Rows, where: DeliveryFilter, limit: int | None) -> list[str]:
    statement = f"SELECT id FROM deliveries{_FILTER} ORDER BY seq LIMIT $5::int"
    found = await rows(statement, *_values(where), None if limit is None else str(limit))
    return [delivery_id for (delivery_id,) in found]


async def named(rows: Rows, name: str, tenant_id: str | None, limit: int) -> list[DeliveryRecord]:
    values = (name, tenant_id, str(limit))
    found = await rows(f"{_RECORD} WHERE id = $1{_OF_TENANT}", *values)
    if not found:
        found = await rows(f"{_RECORD} WHERE starts_with(id, $1){_OF_TENANT}", *values)
    return [record_of(row) for row in found]


async def paused(rows: Rows) -> frozenset[str]:
    return frozenset(role.removeprefix(PAUSED) for (role,) in await rows(_PAUSED, PAUSED))


def _values(where: DeliveryFilter) -> tuple[str | None, ...]:
    since = None if where.since_us is None else str(where.since_us)
    return where.status, where.channel, where.tenant_id, since
