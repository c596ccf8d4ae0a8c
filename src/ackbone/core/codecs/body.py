"""Wire forms whose body is the payload. All other fields are headers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.errors import DecodeError, InvalidMessage
from ackbone.core.message import Message

from . import fields
from .json_text import dumps, loads


class _BodyCodec(ABC):
    """The shared part of these codecs: the headers."""

    name = ""
    version = "1"
    content_type = ""

    @abstractmethod
    def payload(self, body: bytes) -> Any: ...

    @abstractmethod
    def body(self, payload: Any) -> bytes: ...

    def decode(self, delivery: Delivery, sub: Subscription) -> Message:
        headers = {name.lower(): value for name, value in delivery.headers.items()}
        return Message(
            id=fields.id_of(headers.get("x-message-id"), delivery, sub),
            type=fields.text(
                sub.type_header, headers.get(sub.type_header.lower()), default=sub.default_type
            ),
            payload=self.payload(delivery.body),
            tenant_id=fields.tenant_of(headers.get(sub.tenant_header.lower()), sub),
            source=sub.queue,
            channel=fields.text("x-channel", headers.get("x-channel"), default=""),
            priority=fields.priority_of(headers.get("x-priority", delivery.priority)),
            correlation_id=fields.optional("x-correlation-id", headers.get("x-correlation-id")),
            trace=fields.header_trace(headers),
            idempotency_key=fields.key("x-dedup-key", headers.get("x-dedup-key")),
            ordering_key=fields.key("x-ordering-key", headers.get("x-ordering-key", delivery.key)),
            created_at=fields.sent_at(delivery),
            expires_at=fields.moment("x-expires-at", headers.get("x-expires-at")),
            headers=dict(delivery.headers),
            raw=fields.raw_of(self, delivery),
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
            "x-expires-at": fields.iso(message.expires_at) if message.expires_at else None,
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
