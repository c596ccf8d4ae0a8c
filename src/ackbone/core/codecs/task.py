"""The wire form of the task protocol: flat text fields. The field `payload` is a JSON object.

task_id, tool_name, payload and idempotency_key are required. A broker whose messages consist of
fields (Redis Streams) uses these fields; elsewhere the body is a JSON object of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from ackbone.core.broker import Delivery, Outgoing, Subscription
from ackbone.core.errors import DecodeError, InvalidMessage
from ackbone.core.message import DEFAULT_TENANT, Message, Priority
from ackbone.core.task_protocol import FLAT, FLAT_HEADERS, FlatDelivery, FlatOutgoing

from . import values
from .base import Codec
from .values import dumps, is_model, loads, loads_text

REQUIRED = ("task_id", "tool_name", "payload", "idempotency_key")
_TEXTS = ("tenant_id", "source", "channel", "correlation_id", "ordering_key", "trace")
_OWN = frozenset(
    {*REQUIRED, *_TEXTS, "retry_count", "priority", "created_at", "expires_at", "metadata",
     "headers"}
)  # fmt: skip
_USUAL = frozenset(
    {*REQUIRED, "retry_count", "created_at", "tenant_id", "priority", "ordering_key"}
)
"""Fields that `decode` reads in its main call."""
_encode = msgspec.json.Encoder().encode
_required = operator.itemgetter(*REQUIRED)
_rare_of = operator.attrgetter(*_TEXTS, "priority", "expires_at", "headers", "extra")
_NOTHING_RARE = _rare_of(Message(type=""))
CREATED_MARK = "created_event"
"""Field of a task whose `task.created` was written when it was submitted. Its value is the task's
id, because a copy that is sent under another id needs its own event."""
_LONGEST_COUNT = 9
"""Largest number of digits of a retry_count."""


class TaskCodec(Codec):
    """Tasks. `task_id` is the message's id, `tool_name` its type. Unknown fields become `extra`."""

    name = "task"
    version = "1.2.1"
    content_type = "application/json"
    headers = FLAT_HEADERS

    def decode(self, delivery: Delivery, sub: Subscription) -> Message:
        found: Mapping[str, str]
        if isinstance(delivery, FlatDelivery):
            found = delivery.fields
        else:
            found = _texts(loads(delivery.body))
        try:
            task_id, tool_name, payload, key = _required(found)
        except KeyError:
            task_id = tool_name = payload = key = ""
        if not (task_id and tool_name and payload and key):
            missing = [name for name in REQUIRED if not found.get(name)]
            raise DecodeError(f"missing required fields: {', '.join(missing)}")
        tenant, lane = found.get("tenant_id"), found.get("ordering_key", delivery.key)
        # No function call for a missing field: this is the hot path.
        message = Message(
            id=values.short("task_id", task_id),
            type=values.text("tool_name", tool_name, default=sub.default_type),
            payload=_object("payload", payload),
            tenant_id=DEFAULT_TENANT
            if tenant is None and sub.tenant is None
            else values.tenant_of(tenant, sub),
            priority=values.priority_of(found.get("priority", delivery.priority)),
            idempotency_key=values.short("idempotency_key", key),
            ordering_key=None if lane is None else values.key("ordering_key", lane),
            created_at=values.moment("created_at", found.get("created_at"))
            or values.sent_at(delivery),
            metadata={"retry_count": _count(found.get("retry_count"))},
            raw=values.raw_of(self, delivery),
        )
        return message if found.keys() <= _USUAL else _with_rare_fields(message, found)

    def encode(self, message: Message) -> tuple[bytes, dict[str, str]]:
        return self.body_of(self.fields_of(message)), {FLAT: "1"}

    def outgoing(
        self, message: Message, *, delay_s: float = 0.0, ttl_s: float | None = None
    ) -> Outgoing:
        fields = self.fields_of(message)
        return FlatOutgoing(
            id=message.id,
            body=self.body_of(fields),
            headers=FLAT_HEADERS,
            priority=int(message.priority),
            delay_s=delay_s,
            ttl_s=ttl_s,
            key=message.ordering_key,
            fields=fields,
        )

    def new(self, message_id: str, message_type: str, payload: Any) -> Outgoing:
        fields = {
            "task_id": message_id,
            "tool_name": message_type,
            "payload": _payload_text(payload),
            "idempotency_key": message_id,
            "retry_count": "0",
            "created_at": values.iso(datetime.now(UTC)),
        }
        body = self.body_of(fields)
        return FlatOutgoing(id=message_id, body=body, headers=FLAT_HEADERS, fields=fields)

    def body_of(self, written: Mapping[str, str]) -> bytes:
        """Return the fields as one JSON object. Raises InvalidMessage for invalid Unicode."""
        try:
            return _encode(written)
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"the value cannot be written as JSON: {error}") from None

    def fields_of(self, message: Message) -> dict[str, str]:
        """Return the fields of a message. Raises InvalidMessage if it cannot be a task."""
        metadata = message.metadata
        count = message.attempt - 1
        if metadata:
            metadata = dict(metadata)
            count = metadata.pop("retry_count", count)
        written = {
            "task_id": message.id,
            "tool_name": message.type,
            "payload": _payload_text(message.payload),
            # Every task needs a key. Without one, its id is the key.
            "idempotency_key": message.idempotency_key or message.id,
            "retry_count": str(count),
            "created_at": values.iso(message.created_at),
        }
        if _rare_of(message) == _NOTHING_RARE and not metadata:
            return written
        for name in _TEXTS:
            value = getattr(message, name)
            if value and (name, value) != ("tenant_id", DEFAULT_TENANT):
                written[name] = value
        if message.priority != Priority.NORMAL:
            written["priority"] = str(int(message.priority))
        if message.expires_at is not None:
            written["expires_at"] = values.iso(message.expires_at)
        headers = {name: value for name, value in message.headers.items() if name != FLAT}
        for name, mapping in (("metadata", metadata), ("headers", headers)):
            if mapping:
                written[name] = dumps(mapping).decode()
        for name, value in message.extra.items():
            written[name] = value if isinstance(value, str) else dumps(value).decode()
        return written


def _payload_text(payload: Any) -> str:
    if payload is None:
        return "{}"
    if not isinstance(payload, dict) and not is_model(payload):
        raise InvalidMessage("codec 'task' takes a payload that is a JSON object")
    return dumps(payload).decode()


def _with_rare_fields(message: Message, found: Mapping[str, str]) -> Message:
    """Add the rare fields of a message."""
    return msgspec.structs.replace(
        message,
        source=values.text("source", found.get("source"), default=""),
        channel=values.text("channel", found.get("channel"), default=""),
        correlation_id=values.optional("correlation_id", found.get("correlation_id")),
        trace=values.optional("trace", found.get("trace")),
        expires_at=values.moment("expires_at", found.get("expires_at")),
        headers=_headers(found.get("headers")),
        metadata={**_object("metadata", found.get("metadata")), **message.metadata},
        extra={name: value for name, value in found.items() if name not in _OWN},
    )


def _texts(found: Any) -> dict[str, str]:
    if type(found) is not dict:
        raise DecodeError("a task must be a JSON object of fields")
    for name, value in found.items():
        if type(value) is not str:
            raise DecodeError(f"field {name!r:.60} is not text")
    return found


def _object(name: str, text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = loads_text(text)
    except DecodeError as error:
        raise DecodeError(f"{name} is not valid JSON: {error}") from None
    if type(found) is not dict:
        raise DecodeError(f"{name} is not a JSON object")
    return found


def _headers(text: str | None) -> dict[str, str]:
    found = _object("headers", text)
    if not all(type(value) is str for value in found.values()):
        raise DecodeError("headers contain a value that is not text")
    return found


def _count(text: str | None) -> int:
    """Read the sender's `retry_count`. The store counts for itself."""
    if not text or text == "0":
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > _LONGEST_COUNT:
        raise DecodeError(f"retry_count is not a number of retries: {text!r:.40}")
    return int(text)
