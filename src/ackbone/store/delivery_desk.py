"""What operators do to deliveries, each act inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from ackbone.core import events
from ackbone.core.delivery_desk import DeliveryRecord, refusal
from ackbone.core.errors import AckboneError, InvalidMessage
from ackbone.core.events import Entry
from ackbone.core.message import DEFAULT_TENANT
from ackbone.core.parcels import AGREED
from ackbone.core.text import storable

from .parcel_rows import PAUSED
from .unit import Change, Tx

RETRIED_FROM = "status IN ('failed', 'unknown', 'pending')"
AGREES = f"in_doubt = CASE status WHEN 'unknown' THEN {AGREED} ELSE in_doubt END"
"""Only for what waits for a person: of others nobody said that they may be repeats."""
CHANGED_IN = "status IN ('pending', 'queued', 'failed', 'unknown')"
LONGEST_CHANNEL = 200
_JSON = ("receipts", "options")


def record_of(row: Sequence[Any]) -> DeliveryRecord:
    """A row with the columns in the order of the record's fields."""
    fields = dict(zip(DeliveryRecord.__struct_fields__, row, strict=True))
    fields["in_doubt"] = bool(fields["in_doubt"])
    fields["receipts"] = tuple(msgspec.json.decode(fields["receipts"] or "[]"))
    fields["options"] = msgspec.json.decode(fields["options"] or "{}")
    return DeliveryRecord(**fields)


def pause_role(channel: str) -> str:
    if not channel or len(channel) > LONGEST_CHANNEL:
        raise InvalidMessage(f"{channel!r:.60} is no channel's name")
    return PAUSED + channel


async def retry(tx: Tx, change: Change, delivery_id: str, by: str, now_us: int) -> None:
    """Raises NotFound or Conflict, as the other acts do."""
    told, _ = await _change(tx, tx.sql.desk.retry, delivery_id, now_us, "sent again")
    change.entries.append(told(events.DELIVERY_RETRIED, {"by": by}))


async def edit(tx: Tx, change: Change, delivery_id: str, content: str, by: str) -> None:
    text = content.encode("utf-8", "backslashreplace").decode()
    told, _ = await _change(tx, tx.sql.desk.edit, delivery_id, text, "edited")
    change.entries.append(told(events.DELIVERY_EDITED, {"by": by}))


async def discard(
    tx: Tx, change: Change, delivery_id: str, reason: str, by: str, now_us: int
) -> None:
    if tx.repeated and await tx.rows(tx.sql.desk.state, delivery_id) == [("discarded", False)]:
        return  # an earlier attempt of this call did it, and its answer was lost
    told, lane = await _change(tx, tx.sql.desk.discard, delivery_id, now_us, "discarded")
    if lane is not None:
        await tx.send(tx.sql.desk.promote, lane, now_us)
    data = {"reason": storable(reason), "by": by}
    change.entries.append(told(events.DELIVERY_DISCARDED, data))


async def set_paused(tx: Tx, change: Change, channel: str, by: str, *, on: bool) -> bool:
    """False: it was so before."""
    if not await tx.rows(tx.sql.desk.pause if on else tx.sql.desk.unpause, pause_role(channel)):
        return False
    kind = events.DELIVERY_PAUSED if on else events.DELIVERY_RESUMED
    # An act on a channel belongs to no message, and to no queue.
    change.entries.append((DEFAULT_TENANT, "", "", kind, {"channel": channel, "by": by}))
    return True


async def each(
    found: Sequence[str], act: Callable[[str], Awaitable[None]]
) -> list[AckboneError | None]:
    """One answer per item: one that cannot be helped does not stop the others."""
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
        state = await tx.rows(tx.sql.desk.state, delivery_id)
        raise refusal(delivery_id, (state[0][0], bool(state[0][1])) if state else None, verb)
    tenant_id, subscription, task_id, channel, lane = found[0]

    def told(kind: str, data: dict[str, Any]) -> Entry:
        named = {"delivery_id": delivery_id, "channel": channel, **data}
        return tenant_id, subscription, task_id, kind, named

    return told, lane
