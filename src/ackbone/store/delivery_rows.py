"""Rows of `deliveries`: replies as columns in the order of the table, and back.

Times are integer microseconds; a dialect turns them into its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from ackbone.core.events import DELIVERY_CREATED, Entry
from ackbone.core.ids import derived_id
from ackbone.core.outbound.delivery import LONGEST_RECIPIENT, New, Outbound
from ackbone.core.outbound.send_order import DueReply, PutOff, lane_of
from ackbone.core.outbound.settling import AGREED, AttemptEnd, EndedRow
from ackbone.core.outbound.subscribers import OURS, Subscribers
from ackbone.core.store import Reply, Run, Send
from ackbone.core.text import storable

DeliveryRow = tuple[Any, ...]
"""Values in the order of `DELIVERY_COLUMNS`."""
WindowRow = tuple[str, str, int]
"""The key of a window, its state and when it ends."""

DELIVERY_COLUMNS = (
    "id, tenant_id, subscription, task_id, channel, recipient, content, conversation, priority,"
    " due_at, created_at, lane, options, max_retries, expires_at"
)
PAUSED = "paused channel "
"""A row of `roles` that begins with this pauses a channel: nothing is taken for it."""
LIVE = "status IN ('pending', 'queued', 'sending')"
"""Word for word the condition of the partial index."""

ALL = 1 << 62
"""A limit that no table reaches."""

_encode = msgspec.json.Encoder().encode


class DeliveryRows(Protocol):
    """Writes of many rows, whose form differs between the dialects (`Tx.deliveries`)."""

    def insert(self, rows: Sequence[DeliveryRow]) -> None:
        """Write new deliveries with the commit. An id that is there already stays as it is."""

    async def add(self, row: DeliveryRow) -> bool:
        """Write one delivery now. Return False if its id existed already."""

    async def put_off(self, found: Sequence[PutOff]) -> None: ...

    async def end(
        self, batch: Sequence[AttemptEnd], worker_id: int, now_us: int
    ) -> dict[tuple[str, int], EndedRow]:
        """Change the rows that this worker is still sending by these calls; return them by id and
        call. If the batch names a call twice, the first one counts."""

    async def save_windows(self, rows: Sequence[WindowRow]) -> None: ...

    def publish(self, sends: Sequence[Send], now_us: int) -> None:
        """Write messages into the outbox with the commit."""


# -- new deliveries -------------------------------------------------------------------------------


def delivery_row(run: Run, reply: Reply, n: int, now_us: int) -> DeliveryRow:
    """Return a run's reply as a row. Its id is the same if the write is repeated."""
    message, sub = run.message, run.subscription
    kind = "now" if reply.now else "end"
    new = New(
        id=derived_id(message.tenant_id, sub, message.id, str(run.attempt), kind, str(n)),
        tenant_id=message.tenant_id,
        channel=reply.channel,
        recipient=reply.recipient,
        content=reply.content,
        conversation=reply.conversation,
        priority=reply.priority,
        options=reply.options,
        expires_s=reply.expires_s,
    )
    return new_delivery_row(new, now_us, subscription=sub, task_id=message.id)


def created_event(row: DeliveryRow) -> Entry:
    """Return the event of a `delivery_row`."""
    delivery_id, tenant_id, subscription, task_id, channel = row[:5]
    data = {"delivery_id": delivery_id, "channel": channel}
    return tenant_id, subscription, task_id, DELIVERY_CREATED, data


def new_delivery_row(
    new: New, now_us: int, *, subscription: str | None = None, task_id: str | None = None
) -> DeliveryRow:
    """Return a reply as a row. One that no run made has no task."""
    recipient = storable(new.recipient)[:LONGEST_RECIPIENT]
    return (
        new.id,
        new.tenant_id,
        subscription,
        task_id,
        new.channel,
        recipient,
        new.content.encode("utf-8", "backslashreplace").decode(),
        new.conversation,
        new.priority,
        now_us,
        now_us,
        lane_of(new.tenant_id, new.channel, recipient, new.conversation, int(new.priority)),
        _encode(dict(new.options)).decode() if new.options else None,
        new.max_retries,
        None if new.expires_s is None else now_us + int(new.expires_s * 1e6),
    )


def notification_rows(
    subscribers: Subscribers, entries: Sequence[Entry], now_us: int
) -> list[DeliveryRow]:
    """Return the notifications that these events cause, as rows."""
    found = subscribers.notifications(entries, now_us)
    return [new_delivery_row(new, now_us, subscription=OURS) for new in found]


# -- due deliveries -------------------------------------------------------------------------------


def due_reply(row: Sequence[Any]) -> DueReply:
    """Read a row of the statements `due`, `behind` and `held`, whose columns have this order."""
    (id_, tenant_id, channel, recipient, conversation, task_id, options, calls, retry_count,
     max_retries, in_doubt, subscription, lane, priority, expires_us, made_us,
     is_head) = row  # fmt: skip
    reply = Outbound(
        id=id_,
        tenant_id=tenant_id,
        channel=channel,
        recipient=recipient,
        content="",
        conversation=conversation,
        task_id=task_id,
        priority=priority,
        expires_us=expires_us,
        options=msgspec.json.decode(options) if options else {},
        call=calls + 1,
        retry_count=retry_count,
        max_retries=max_retries,
        in_doubt=bool(in_doubt),
        repeat_agreed=in_doubt == AGREED,
        made_us=made_us,
    )
    return DueReply(reply, subscription or "", lane, bool(is_head))


def with_content(due: DueReply, content: str, receipts: str | None) -> Outbound:
    """Return the reply as its channel sends it."""
    found = msgspec.json.decode(receipts) if receipts else ()
    return msgspec.structs.replace(due.reply, content=content, receipts=tuple(found))
