"""Rows of what leaves the store: replies and messages, as columns in the order of their tables.

Times are integer microseconds and ids 16 bytes; a dialect turns them into its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ackbone.core.delivery import LONGEST_RECIPIENT, MAX_RETRIES, New
from ackbone.core.events import DELIVERY_CREATED, Entry
from ackbone.core.ids import derived_id, uuid7_bytes
from ackbone.core.parcels import lane_of
from ackbone.core.store import Reply, Run, Send
from ackbone.core.subscribers import OURS, Subscribers
from ackbone.core.text import storable

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


DELIVERY_COLUMNS = (
    "id, tenant_id, subscription, task_id, channel, recipient, content, conversation, priority,"
    " due_at, created_at, lane, options, max_retries, expires_at"
)


def delivery_row(run: Run, reply: Reply, n: int, now_us: int) -> tuple[Any, ...]:
    """A reply as a row of `deliveries`; its id is the same if the write is repeated."""
    message = run.message
    kind = "now" if reply.now else "end"
    recipient = storable(reply.recipient)[:LONGEST_RECIPIENT]
    return (
        derived_id(message.tenant_id, run.subscription, message.id, str(run.attempt), kind, str(n)),
        message.tenant_id,
        run.subscription,
        message.id,
        reply.channel,
        recipient,
        _content(reply.content),
        reply.conversation,
        reply.priority,
        now_us,
        now_us,
        lane_of(
            message.tenant_id, reply.channel, recipient, reply.conversation, int(reply.priority)
        ),
        _options(reply.options),
        MAX_RETRIES,
        _expires(reply.expires_s, now_us),
    )


def created_event(row: Sequence[Any]) -> Entry:
    """Of a `delivery_row`."""
    delivery_id, tenant_id, subscription, task_id, channel = row[:5]
    data = {"delivery_id": delivery_id, "channel": channel}
    return tenant_id, subscription, task_id, DELIVERY_CREATED, data


def new_delivery_row(new: New, now_us: int, *, subscription: str | None = None) -> tuple[Any, ...]:
    """A reply that nobody's run made as a row of `deliveries`."""
    recipient = storable(new.recipient)[:LONGEST_RECIPIENT]
    return (
        new.id,
        new.tenant_id,
        subscription,
        None,
        new.channel,
        recipient,
        _content(new.content),
        new.conversation,
        new.priority,
        now_us,
        now_us,
        lane_of(new.tenant_id, new.channel, recipient, new.conversation, int(new.priority)),
        _options(new.options),
        new.max_retries,
        _expires(new.expires_s, now_us),
    )


def telling_rows(
    subscribers: Subscribers, entries: Sequence[Entry], now_us: int
) -> list[tuple[Any, ...]]:
    """What events make their subscribers hear, as rows of `deliveries`."""
    told = subscribers.told_of(entries, now_us)
    return [new_delivery_row(new, now_us, subscription=OURS) for new in told]


def _content(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _options(options: Mapping[str, Any]) -> str | None:
    return _encode(dict(options)).decode() if options else None


def _expires(expires_s: float | None, now_us: int) -> int | None:
    return None if expires_s is None else now_us + int(expires_s * 1e6)
