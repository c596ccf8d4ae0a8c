"""The standard message: message_id, message_type, payload, metadata and so on, as JSON."""

from __future__ import annotations

import operator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from ackbone.core.broker import Delivery, Outgoing, Subscription
from ackbone.core.errors import DecodeError, InvalidMessage
from ackbone.core.message import DEFAULT_TENANT, Message, Priority

from . import values
from .base import Codec
from .values import MAX_DEPTH, dumps, encode, has_non_finite, loads

VERSION = "1.0"
_BYTES = (bytes, bytearray, memoryview)
_OURS = ("tenant_id", "source", "channel", "idempotency_key", "ordering_key", "expires_at", "trace")
"""Fields of `Message` that the standard form has inside `metadata`."""
_ours_of = operator.attrgetter(*_OURS)
FIELDS = frozenset(
    {
        *_OURS,
        "message_id",
        "correlation_id",
        "message_type",
        "timestamp",
        "version",
        "priority",
        "payload",
        "metadata",
    }
)
"""Every field of the standard form that ackbone understands."""


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """`metadata` with only the fields that ackbone itself writes."""

    tenant_id: str | None = None
    source: str = ""
    channel: str = ""
    idempotency_key: str | None = None
    ordering_key: str | None = None
    expires_at: str | None = None
    trace: str | None = None
    retry_count: int | msgspec.UnsetType = msgspec.UNSET


class _Wire(msgspec.Struct, forbid_unknown_fields=True):
    """The standard message with only its own fields."""

    message_id: Annotated[str, msgspec.Meta(min_length=1)]
    message_type: str
    timestamp: str
    version: Literal["1.0"]
    priority: int
    metadata: _Metadata
    payload: Any = None
    correlation_id: str | None = None


_decode_wire = msgspec.json.Decoder(_Wire).decode


def _plain(body: bytes) -> _Wire | None:
    """Read a message in one step, as most can be. None: it must be read field by field."""
    brackets = body.count(b"{")
    if body.find(b"[") >= 0:  # finding none is faster than counting
        brackets += body.count(b"[")
    if brackets > MAX_DEPTH:
        return None
    try:
        return _decode_wire(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None


class _Written(msgspec.Struct, kw_only=True, gc=False):
    """The standard message as it is written, its fields in the order of the wire."""

    message_id: str
    correlation_id: str | msgspec.UnsetType = msgspec.UNSET
    message_type: str
    timestamp: datetime | str
    version: str = VERSION
    priority: int = Priority.NORMAL.value
    payload: Any
    metadata: Any


_NEW_METADATA = msgspec.Raw(encode({"tenant_id": DEFAULT_TENANT, "retry_count": 0}))
"""`metadata` of a new message without any of these fields."""


class StandardCodec(Codec):
    """The standard message. Fields that it does not have are sent in `metadata`."""

    name = "standard"
    version = VERSION
    content_type = "application/json"

    def decode(self, delivery: Delivery, sub: Subscription) -> Message:
        wire = _plain(delivery.body)
        return self._read(delivery, sub) if wire is None else self._typed(wire, delivery, sub)

    def _typed(self, wire: _Wire, delivery: Delivery, sub: Subscription) -> Message:
        """Build the message from a body that has no unknown fields."""
        metadata, headers = wire.metadata, delivery.headers
        tenant, key, lane = metadata.tenant_id, metadata.idempotency_key, metadata.ordering_key
        count = metadata.retry_count
        # No function call for a missing field: this is the hot path.
        message = Message(
            id=values.short("message_id", wire.message_id),
            type=values.text("message_type", wire.message_type, default=sub.default_type),
            payload=wire.payload,
            tenant_id=DEFAULT_TENANT
            if tenant == DEFAULT_TENANT and sub.tenant is None
            else values.tenant_of(tenant, sub),
            priority=wire.priority
            if 0 <= wire.priority <= 3
            else values.priority_of(wire.priority),
            idempotency_key=values.key("idempotency_key", key) if key else None,
            ordering_key=values.key("ordering_key", lane) if lane else None,
            created_at=values.moment("timestamp", wire.timestamp) or values.sent_at(delivery),
            headers=dict(headers) if headers else {},
            metadata={} if count is msgspec.UNSET else {"retry_count": count},
            raw=values.raw_of(self, delivery),
        )
        source, channel, correlation = metadata.source, metadata.channel, wire.correlation_id
        expires, trace = metadata.expires_at, metadata.trace
        if trace is None and headers:
            trace = values.header_trace(headers)
        if not (source or channel or correlation or expires or trace):
            return message
        return _with_rare_fields(message, source, channel, correlation, expires, trace)

    def _read(self, delivery: Delivery, sub: Subscription) -> Message:
        """Read a message field by field. Unknown fields are kept as `extra`."""
        left = loads(delivery.body)
        if type(left) is not dict:
            raise DecodeError("a standard message is a JSON object")
        take = left.pop
        version = take("version", VERSION)
        if version != VERSION and not _is_version_1(version):
            raise DecodeError(f"version {version!r:.40} of the standard message is unknown")
        metadata = take("metadata", None) or {}
        if type(metadata) is not dict:
            raise DecodeError("metadata is not an object")
        message_id = take("message_id", None)
        message_type = take("message_type", None)
        correlation_id = take("correlation_id", None)
        timestamp = take("timestamp", None)
        priority = take("priority", delivery.priority)
        payload = take("payload", None)
        own = [metadata.pop(name, None) for name in _OURS]
        if left:  # these fields are also accepted outside of `metadata`
            own = [take(n, None) if v is None else v for n, v in zip(_OURS, own, strict=True)]
        tenant_id, source, channel, idempotency_key, ordering_key, expires_at, trace = own
        headers = delivery.headers
        if trace is None:
            trace = values.header_trace(headers)
        message = Message(
            id=values.id_of(message_id, delivery, sub),
            type=values.text("message_type", message_type, default=sub.default_type),
            payload=payload,
            tenant_id=values.tenant_of(tenant_id, sub),
            priority=values.priority_of(priority),
            idempotency_key=None
            if idempotency_key is None
            else values.key("idempotency_key", idempotency_key),
            ordering_key=None if ordering_key is None else values.key("ordering_key", ordering_key),
            created_at=values.moment("timestamp", timestamp) or values.sent_at(delivery),
            headers=dict(headers) if headers else {},
            metadata=metadata,
            extra=left,
            raw=values.raw_of(self, delivery),
        )
        return _with_rare_fields(message, source, channel, correlation_id, expires_at, trace)

    def encode(self, message: Message) -> tuple[bytes, dict[str, str]]:
        if isinstance(message.payload, _BYTES):
            raise InvalidMessage(
                "a payload of bytes does not fit the standard message; use codec 'binary'"
            )
        metadata: dict[str, Any] = dict(message.metadata)
        for name, value in zip(_OURS, _ours_of(message), strict=True):
            if value is not None and value != "":
                metadata[name] = values.time_of(value) if isinstance(value, datetime) else value
        metadata.setdefault("retry_count", message.attempt - 1)
        correlation_id = message.correlation_id
        written = _Written(
            message_id=message.id,
            correlation_id=msgspec.UNSET if correlation_id is None else correlation_id,
            message_type=message.type,
            timestamp=values.time_of(message.created_at),
            priority=int(message.priority),
            payload=message.payload,
            metadata=metadata,
        )
        if message.extra:
            return dumps({**_fields_of(written), **message.extra}), dict(message.headers)
        return dumps(written), dict(message.headers)

    def new(self, message_id: str, message_type: str, payload: Any) -> Outgoing:
        return Outgoing(id=message_id, body=self.encode_new(message_id, message_type, payload))

    def encode_new(self, message_id: str, message_type: str, payload: Any) -> bytes:
        """Return the body of a new message with only a type and a payload. Faster than `encode`."""
        created_at = datetime.now(UTC)
        try:
            value = encode(payload)
            if (
                value.count(b"[") + value.count(b"{") < MAX_DEPTH
                and not (b"null" in value and has_non_finite(payload))
                and not isinstance(payload, _BYTES)
            ):
                written = _Written(
                    message_id=message_id,
                    message_type=message_type,
                    timestamp=created_at,
                    payload=msgspec.Raw(value),
                    metadata=_NEW_METADATA,
                )
                return encode(written)
        except (TypeError, ValueError, OverflowError, RecursionError):
            pass  # `encode` below raises an error that says what is wrong
        message = Message(id=message_id, type=message_type, payload=payload, created_at=created_at)
        return self.encode(message)[0]


_NOTHING = (None,) * 5


def _with_rare_fields(
    message: Message, source: Any, channel: Any, correlation_id: Any, expires_at: Any, trace: Any
) -> Message:
    """Add the rare fields of a message.

    They are not in the main call, because Python builds a dict for a call with more than 15
    keywords. That costs as much as the rest of decoding."""
    if (source, channel, correlation_id, expires_at, trace) == _NOTHING:
        return message
    return msgspec.structs.replace(
        message,
        source=values.text("source", source, default=""),
        channel=values.text("channel", channel, default=""),
        correlation_id=values.optional("correlation_id", correlation_id),
        expires_at=values.moment("expires_at", expires_at),
        trace=values.optional("trace", trace),
    )


def _is_version_1(version: Any) -> bool:
    if isinstance(version, str):
        return version.partition(".")[0] == "1"
    return isinstance(version, int | float) and 1 <= version < 2


def _fields_of(struct: msgspec.Struct) -> dict[str, Any]:
    every = msgspec.structs.asdict(struct)
    return {name: value for name, value in every.items() if value is not msgspec.UNSET}
