"""Replies on their way out as rows: what both databases have in common of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ackbone.core.delivery import Outbound
from ackbone.core.parcels import AGREED, Parcel

PAUSED = "paused channel "
"""Rows of `roles` that begin so: nobody takes anything for these channels."""
LIVE = "status IN ('pending', 'queued', 'sending')"
"""As the partial index has it, word for word."""


def parcel_of(row: Sequence[Any]) -> Parcel:
    """A row of a dialect's look at what is due: its columns are in this order."""
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
    return Parcel(reply, subscription or "", lane, bool(is_head))


def whole(parcel: Parcel, content: str, receipts: str | None) -> Outbound:
    """The reply that is sent."""
    found = msgspec.json.decode(receipts) if receipts else ()
    return msgspec.structs.replace(parcel.reply, content=content, receipts=tuple(found))
