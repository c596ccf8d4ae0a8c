"""Codecs: each reads and writes one wire form of a `Message`. Unknown fields are kept.

| codec      | wire form                                                                  |
|------------|----------------------------------------------------------------------------|
| `standard` | the standard message: message_id, message_type, payload, metadata, …       |
| `json`     | the body is the payload, any JSON value; type and tenant come from headers |
| `text`     | the body is the payload, UTF-8 text                                        |
| `binary`   | the body is the payload, bytes                                             |
| `task`     | the task protocol: task_id, tool_name, payload, … as flat fields           |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.errors import DecodeError, InvalidMessage
from ackbone.core.message import Message
from ackbone.core.text import encodable

from . import values
from .base import Codec
from .standard import StandardCodec
from .task import TaskCodec
from .values import dumps, loads

# -- bodies that are the payload -------------------------------------------------------------------


class _BodyCodec(Codec):
    """A codec whose body is the payload. All other fields are headers, which these codecs share."""

    version = "1"

    @abstractmethod
    def payload(self, body: bytes) -> Any: ...

    @abstractmethod
    def body(self, payload: Any) -> bytes: ...

    def decode(self, delivery: Delivery, sub: Subscription) -> Message:
        headers = {name.lower(): value for name, value in delivery.headers.items()}
        return Message(
            id=values.id_of(headers.get("x-message-id"), delivery, sub),
            type=values.text(
                sub.type_header, headers.get(sub.type_header.lower()), default=sub.default_type
            ),
            payload=self.payload(delivery.body),
            tenant_id=values.tenant_of(headers.get(sub.tenant_header.lower()), sub),
            source=sub.queue,
            channel=values.text("x-channel", headers.get("x-channel"), default=""),
            priority=values.priority_of(headers.get("x-priority", delivery.priority)),
            correlation_id=values.optional("x-correlation-id", headers.get("x-correlation-id")),
            trace=values.header_trace(headers),
            idempotency_key=values.key("x-dedup-key", headers.get("x-dedup-key")),
            ordering_key=values.key("x-ordering-key", headers.get("x-ordering-key", delivery.key)),
            created_at=values.sent_at(delivery),
            expires_at=values.moment("x-expires-at", headers.get("x-expires-at")),
            headers=dict(delivery.headers),
            raw=values.raw_of(self, delivery),
        )

    def encode(self, message: Message) -> tuple[bytes, dict[str, str]]:
        headers = dict(message.headers)
        named: dict[str, str | None] = {
            "x-message-id": message.id,
            "x-event-name": message.type,
            "x-tenant-id": message.tenant_id,
            "x-channel": message.channel or None,
            "x-priority": str(int(message.priority)),
            "x-correlation-id": message.correlation_id,
            "traceparent": message.trace,
            "x-dedup-key": message.idempotency_key,
            "x-ordering-key": message.ordering_key,
            "x-expires-at": values.iso(message.expires_at) if message.expires_at else None,
        }
        headers.update({k: v for k, v in named.items() if v is not None})
        return self.body(message.payload), headers


class JsonCodec(_BodyCodec):
    name = "json"
    content_type = "application/json"

    def payload(self, body: bytes) -> Any:
        return loads(body)

    def body(self, payload: Any) -> bytes:
        return dumps(payload)


class TextCodec(_BodyCodec):
    name = "text"
    content_type = "text/plain; charset=utf-8"

    def payload(self, body: bytes) -> str:
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DecodeError(f"not UTF-8 text: {error}") from None

    def body(self, payload: Any) -> bytes:
        if not isinstance(payload, str):
            raise InvalidMessage("codec 'text' takes a str payload")
        try:
            return payload.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"the text cannot be written as UTF-8: {error}") from None


class BinaryCodec(_BodyCodec):
    name = "binary"
    content_type = "application/octet-stream"

    def payload(self, body: bytes) -> bytes:
        return body

    def body(self, payload: Any) -> bytes:
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise InvalidMessage("codec 'binary' takes a bytes payload")
        return bytes(payload)


# -- all codecs ------------------------------------------------------------------------------------

_encode = msgspec.json.Encoder().encode


STANDARD = StandardCodec()
CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (STANDARD, JsonCodec(), TextCodec(), BinaryCodec(), TaskCodec())
}


def stored_form(
    codec: Codec, headers: Mapping[str, str], copy: Mapping[str, Any] | None = None
) -> str:
    """Return what is needed to read a stored body again, as JSON text.

    `copy`: fields of the `Delivery` that this wire form does not contain.
    """
    form: dict[str, Any] = {
        "codec": codec.name,
        "version": codec.version,
        "content_type": codec.content_type,
        "key_id": None,
        "headers": dict(headers),
    }
    if copy:
        form["copy"] = dict(copy)
    try:
        return _encode(form).decode()
    except (TypeError, ValueError):  # headers that are not valid text are escaped
        form["headers"] = {
            encodable(str(name)): encodable(str(value)) for name, value in headers.items()
        }
        return _encode(form).decode()
