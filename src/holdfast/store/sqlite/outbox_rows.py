"""Rows of the outbox: messages that a relay brings to their broker."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from holdfast.core.ids import uuid7_bytes
from holdfast.core.store import Send

OUTBOX = (
    "INSERT INTO outbox (id, tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
    " ordering_key, ttl_us, due_at, created_at)"
)
_encode = msgspec.json.Encoder().encode


def outbox_row(send: Send, now_us: int) -> tuple[Any, ...]:
    """Values for `OUTBOX`."""
    out = send.outgoing
    return (
        uuid7_bytes(),
        send.tenant_id,
        send.queue,
        out.id,
        _encode(dict(out.headers)).decode(),
        out.body,
        zlib.crc32(out.body),
        out.priority,
        out.key,
        None if out.ttl_s is None else int(out.ttl_s * 1e6),
        now_us + int(out.delay_s * 1e6),
        now_us,
    )
