"""Replies as operators see them, and what operators do to them, inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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

from .arrays import moment
from .change import Change
from .database import Tx
from .delivery_rows import Rows, promote
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
_TOLD = " RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), channel, lane"
_RETRY = (
    f"UPDATE deliveries SET status = 'pending', due_at = {moment('$2::bigint')}, retry_count = 0,"
    f" last_attempt_at = NULL, expires_at = NULL, {AGREES} WHERE id = $1 AND {RETRIED_FROM}{_TOLD}"
)
_EDIT = (
    f"UPDATE deliveries SET content = $2 WHERE id = $1 AND receipts IS NULL AND {CHANGED_IN}{_TOLD}"
)
_DISCARD = (
    f"UPDATE deliveries SET status = 'discarded', due_at = {moment('$2::bigint')}"
    f" WHERE id = $1 AND {CHANGED_IN}{_TOLD}"
)
_STATE = "SELECT status, receipts IS NOT NULL FROM deliveries WHERE id = $1"
_PAUSED = "SELECT role FROM roles WHERE starts_with(role, $1)"
_PAUSE = "INSERT INTO roles (role) VALUES ($1) ON CONFLICT (role) DO NOTHING RETURNING 1"
_RESUME = "DELETE FROM roles WHERE role = $1 RETURNING 1"


# -- looking --------------------------------------------------------------------------------------


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


# -- acting ---------------------------------------------------------------------------------------


async def retry(tx: Tx, change: Change, delivery_id: str, by: str, now_us: int) -> None:
    """Raises NotFound or Conflict, as the other acts do."""
    told, _ = await _change(tx, _RETRY, delivery_id, str(now_us), "sent again")
    change.entries.append(told(events.DELIVERY_RETRIED, {"by": by}))


async def edit(tx: Tx, change: Change, delivery_id: str, content: str, by: str) -> None:
    text = content.encode("utf-8", "backslashreplace").decode()
    told, _ = await _change(tx, _EDIT, delivery_id, text, "edited")
    change.entries.append(told(events.DELIVERY_EDITED, {"by": by}))


async def discard(
    tx: Tx, change: Change, delivery_id: str, reason: str, by: str, now_us: int
) -> None:
    if tx.repeated and await tx.rows(_STATE, delivery_id) == [("discarded", False)]:
        return  # by this very call, unheard
    told, lane = await _change(tx, _DISCARD, delivery_id, str(now_us), "discarded")
    await promote(tx, [lane], now_us)
    data = {"reason": storable(reason), "by": by}
    change.entries.append(told(events.DELIVERY_DISCARDED, data))


async def set_paused(tx: Tx, change: Change, channel: str, by: str, *, on: bool) -> bool:
    """False: it was so before."""
    if not await tx.rows(_PAUSE if on else _RESUME, pause_role(channel)):
        return False
    kind = events.DELIVERY_PAUSED if on else events.DELIVERY_RESUMED
    # An act on a channel belongs to no message, and to no queue.
    change.entries.append((DEFAULT_TENANT, "", "", kind, {"channel": channel, "by": by}))
    return True


async def each(
    found: Sequence[str], act: Callable[[str], Awaitable[None]]
) -> list[HoldfastError | None]:
    """One answer per item: one that cannot be helped does not stop the others."""
    answers: list[HoldfastError | None] = []
    for delivery_id in found:
        try:
            await act(delivery_id)
            answers.append(None)
        except HoldfastError as error:
            answers.append(error)
    return answers


async def _change(
    tx: Tx, statement: str, delivery_id: str, value: str, verb: str
) -> tuple[Callable[[str, dict[str, Any]], events.Entry], str | None]:
    found = await tx.rows(statement, delivery_id, value)
    if not found:
        state = await tx.rows(_STATE, delivery_id)
        raise refusal(delivery_id, (state[0][0], state[0][1]) if state else None, verb)
    tenant_id, subscription, task_id, channel, lane = found[0]

    def told(kind: str, data: dict[str, Any]) -> events.Entry:
        named = {"delivery_id": delivery_id, "channel": channel, **data}
        return tenant_id, subscription, task_id, kind, named

    return told, lane
