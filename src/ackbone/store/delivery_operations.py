"""Deliveries as operators change them, inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.errors import AckboneError, InvalidMessage
from ackbone.core.events import Entry
from ackbone.core.message import DEFAULT_TENANT
from ackbone.core.outbound.delivery_records import refusal
from ackbone.core.text import storable

from .delivery_rows import PAUSED
from .unit import Change, Tx

LONGEST_CHANNEL = 200


def pause_role(channel: str) -> str:
    if not channel or len(channel) > LONGEST_CHANNEL:
        raise InvalidMessage(f"{channel!r:.60} is not the name of a channel")
    return PAUSED + channel


async def retry(tx: Tx, change: Change, delivery_id: str, by: str, now_us: int) -> None:
    """Raises NotFound or Conflict, as the other acts do."""
    event_of, _ = await _change(tx, tx.sql.deliveries.retry, delivery_id, now_us, "sent again")
    change.entries.append(event_of(events.DELIVERY_RETRIED, {"by": by}))


async def edit(tx: Tx, change: Change, delivery_id: str, content: str, by: str) -> None:
    text = content.encode("utf-8", "backslashreplace").decode()
    event_of, _ = await _change(tx, tx.sql.deliveries.edit, delivery_id, text, "edited")
    change.entries.append(event_of(events.DELIVERY_EDITED, {"by": by}))


async def discard(
    tx: Tx, change: Change, delivery_id: str, reason: str, by: str, now_us: int
) -> None:
    sql = tx.sql.deliveries
    if tx.repeated and await tx.rows(sql.state, delivery_id) == [("discarded", False)]:
        return  # an earlier attempt of this call was committed, and its answer was lost
    event_of, lane = await _change(tx, sql.discard, delivery_id, now_us, "discarded")
    if lane is not None:
        await tx.rows(sql.promote, [lane], now_us)
    data = {"reason": storable(reason), "by": by}
    change.entries.append(event_of(events.DELIVERY_DISCARDED, data))


async def set_paused(tx: Tx, change: Change, channel: str, by: str, *, on: bool) -> bool:
    """Return False if the channel was already in this state."""
    if not await tx.rows(
        tx.sql.deliveries.pause if on else tx.sql.deliveries.unpause, pause_role(channel)
    ):
        return False
    kind = events.DELIVERY_PAUSED if on else events.DELIVERY_RESUMED
    # An act on a channel belongs to no message and to no queue.
    change.entries.append((DEFAULT_TENANT, "", "", kind, {"channel": channel, "by": by}))
    return True


async def each(
    found: Sequence[str], act: Callable[[str], Awaitable[None]]
) -> list[AckboneError | None]:
    """Return one answer per delivery. One that is refused does not stop the others."""
    answers: list[AckboneError | None] = []
    for delivery_id in found:
        try:
            await act(delivery_id)
            answers.append(None)
        except AckboneError as error:
            answers.append(error)
    return answers


async def _change(
    tx: Tx, statement: str, delivery_id: str, value: str | int, verb: str
) -> tuple[Callable[[str, dict[str, Any]], Entry], str | None]:
    found = await tx.rows(statement, delivery_id, value)
    if not found:
        state = await tx.rows(tx.sql.deliveries.state, delivery_id)
        raise refusal(delivery_id, (state[0][0], bool(state[0][1])) if state else None, verb)
    tenant_id, subscription, task_id, channel, lane = found[0]

    def event_of(kind: str, data: dict[str, Any]) -> Entry:
        named = {"delivery_id": delivery_id, "channel": channel, **data}
        return tenant_id, subscription, task_id, kind, named

    return event_of, lane
