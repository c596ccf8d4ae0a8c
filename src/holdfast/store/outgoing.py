"""Rows of what leaves the store: replies and messages, as columns in the order of their tables.

Times are integer microseconds and ids 16 bytes; a dialect turns them into its own.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from holdfast.core.ids import derived_id, uuid7_bytes
from holdfast.core.store import Reply, Run, Send
from holdfast.store.letter import storable

_encode = msgspec.json.Encoder().encode


def outbox_row(send: Send, now_us: int) -> tuple[Any, ...]:
    """A row of `outbox`."""
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


def delivery_row(run: Run, reply: Reply, n: int, now_us: int) -> tuple[Any, ...]:
    """A reply as a row of `deliveries`; its id is the same if the write is repeated."""
    message = run.message
    kind = "now" if reply.now else "end"
    return (
        derived_id(message.tenant_id, run.subscription, message.id, str(run.attempt), kind, str(n)),
        message.tenant_id,
        run.subscription,
        message.id,
        reply.channel,
        storable(reply.recipient)[:255],
        reply.content.encode("utf-8", "backslashreplace").decode(),
        reply.conversation,
        reply.priority,
        now_us,
        now_us,
    )
