"""AMQP messages and ours: how one is written as the other.

Our messages have a table `x-ackbone` among their headers, with what AMQP has no property for.
Messages of other programs are handed over as they are. Headers that are not text become text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from pamqp import commands as spec

from ackbone.core.broker import Delivery, Outgoing
from ackbone.core.clock import LAST, to_us
from ackbone.core.errors import InvalidMessage

NORMAL = 1
LEVELS = (3, 2, NORMAL, 0)
"""Priorities, the highest first. Each has its own queue: quorum queues have none before 4.0."""
LONGEST_NAME = 128
"""Characters of a header's name. The driver cuts longer ones off without a word."""
_OURS = "x-ackbone"
_DEATHS, _OF_DEATHS = "x-death", ("x-first-death-", "x-last-death-")
"""Headers that the server adds to a message that it moves to a dead-letter queue."""
_WHY = {
    "rejected": "a reader rejected it",
    "expired": "the time to live of the queue or of the message was over",
    "maxlen": "the queue was full",
    "delivery_limit": "it was returned too often (delivery limit)",
}
_COUNTS = ("x-delivery-count", "x-acquired-count")
_LAST_US = to_us(LAST)


def key_of(queue: str, level: int) -> str:
    """Return the name of a queue. Normal priority uses the queue's own name, which other programs
    know."""
    return queue if level == NORMAL else f"{queue}:p{level}"


def queue_of(key: str) -> str:
    """Return the queue that `key_of` made this name from."""
    name, _, level = key.rpartition(":p")
    return name if name and level in {str(each) for each in LEVELS} else key


def properties_of(out: Outgoing, now_us: int, *, again: str | None) -> spec.Basic.Properties:
    """Return the properties of a message. Raises InvalidMessage.

    There is no `priority` among them. Quorum queues have priorities since 4.0, and a message
    without one, as other programs send it, would overtake ours.

    `again`: a message_id of its own for a second copy of a message whose first copy is not yet
    confirmed. The driver finds a returned message by its message_id.
    """
    ours: dict[str, Any] = {"sent_us": now_us}
    if out.key is not None:
        ours["key"] = out.key
    if out.ttl_s is not None:
        ours["ttl_us"] = int(out.ttl_s * 1e6)
    if again is not None:
        ours["id"] = out.id
    headers: dict[str, Any] = {_OURS: ours}
    for name, value in out.headers.items():
        if not all(isinstance(each, str) for each in (name, value)):
            raise InvalidMessage(f"{out.id}: header {name!r:.80} is not text")
        if not 0 < len(name) <= LONGEST_NAME or name == _OURS:
            raise InvalidMessage(
                f"{out.id}: header name {name!r:.80} is not 1 to {LONGEST_NAME} characters"
            )
        headers[name] = value
    return spec.Basic.Properties(
        delivery_mode=2,
        message_id=again or out.id,
        timestamp=datetime.fromtimestamp(now_us // 1_000_000, UTC),
        headers=headers,
    )


def delivery_of(level: int, message: Any, tag: Any) -> Delivery:
    """Read a message, of ours or of another program. Never raises."""
    properties = message.header.properties
    found: Mapping[str, Any] = properties.headers or {}
    ours = found.get(_OURS)
    given: str | None = properties.message_id or None
    body = bytes(message.body)
    if isinstance(ours, dict):
        sent_us = _number(ours.get("sent_us"))
        ttl_us = _number(ours.get("ttl_us"))
        key = ours.get("key")
        identity = ours.get("id") or given
    else:
        sent_us = to_us(properties.timestamp) if properties.timestamp else None
        ttl_us = key = None
        # Some programs give several messages one id. Copies of one message have one body.
        digest = hashlib.blake2b(body, digest_size=8).hexdigest()
        identity = None if given is None else f"{given}/{digest}"
    expires_us = None if sent_us is None or ttl_us is None else sent_us + ttl_us
    counted = max((_number(found.get(name)) or 0 for name in _COUNTS), default=0)
    return Delivery(
        body=body,
        headers={
            str(name): value if isinstance(value, str) else _text(value)
            for name, value in found.items()
            if name != _OURS and name not in _COUNTS
        },
        tag=tag,
        identity=None if identity is None else str(identity),
        count=1 + max(counted, int(bool(message.delivery.redelivered))),
        sent_at_us=sent_us if sent_us is not None and 0 <= sent_us <= _LAST_US else None,
        priority=level,
        key=key if isinstance(key, str) else None,
        expires_at_us=expires_us if expires_us is not None and expires_us <= _LAST_US else None,
    )


def dead_letter_of(level: int, message: Any, tag: Any) -> Delivery:
    """Read a message that the server moved to a dead-letter queue. Never raises."""
    delivery = delivery_of(level, message, tag)
    deaths = (message.header.properties.headers or {}).get(_DEATHS)
    moves = [each for each in deaths if isinstance(each, dict)] if isinstance(deaths, list) else []
    if not moves:
        failure = f"it was in the dead-letter queue {message.delivery.routing_key}; nobody says why"
        return msgspec.structs.replace(delivery, failure=failure)
    reason, times = str(moves[0].get("reason")), moves[0].get("count")
    failure = f"RabbitMQ moved it out of queue {moves[0].get('queue')}: {_WHY.get(reason, reason)}"
    return msgspec.structs.replace(
        delivery,
        failure=failure if times == 1 else f"{failure} ({times} times)",
        moved_from=[queue_of(str(each.get("queue"))) for each in moves],
        headers={
            name: value
            for name, value in delivery.headers.items()
            if name != _DEATHS and not name.startswith(_OF_DEATHS)
        },
    )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    """Return a header's value of another type as text: JSON, but for bytes and times."""
    if isinstance(value, bytes | bytearray | datetime):
        return _plain(value)
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    return value.isoformat() if isinstance(value, datetime) else str(value)
