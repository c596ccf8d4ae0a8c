"""What both stores have for operators of replies: columns, states, and words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.core.delivery_desk import DeliveryRecord
from holdfast.core.errors import InvalidMessage
from holdfast.core.parcels import AGREED

from .parcel_rows import PAUSED

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
