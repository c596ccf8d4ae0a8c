"""Wire forms as codecs over `Message`. Unknown fields survive; what cannot be read: DecodeError.

| codec      | wire form                                                                  |
|------------|----------------------------------------------------------------------------|
| `standard` | the standard message: message_id, message_type, payload, metadata, …       |
| `json`     | the body is the payload, any JSON value; type and tenant come from headers |
| `text`     | the body is the payload, UTF-8 text                                        |
| `binary`   | the body is the payload, bytes                                             |
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Protocol

import msgspec

from .broker import Delivery, Subscription
from .clock import from_us
from .errors import DecodeError, InvalidMessage
from .ids import derived_id, new_id
from .message import DEFAULT_TENANT, MAX_ID, MAX_TENANT, NAME, Message, Priority, Raw

MAX_DEPTH = 64
VERSION = "1.0"
_BYTES = (bytes, bytearray, memoryview)
_decode_json = msgspec.json.Decoder().decode
_encode_json = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_OURS = ("tenant_id", "source", "channel", "idempotency_key", "ordering_key", "expires_at", "trace")
"""Fields of `Message` that the standard form carries inside `metadata`."""
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
"""Every field of the standard form that has a meaning of its own."""


class Codec(Protocol):
    """One wire form."""

    name: str
    version: str
    content_type: str

    def decode(self, delivery: Delivery, sub: Subscription) -> Message:
        """Raises DecodeError, and nothing else, for bytes that are no message."""
        ...

    def encode(self, message: Message) -> tuple[bytes, dict[str, str]]:
        """Body and headers. Raises InvalidMessage for what this form cannot carry unchanged."""
        ...


def loads(body: bytes) -> Any:
    """JSON as a plain value, refusing what would hurt later: depth, huge numbers, bad text."""
    if not body:
        raise DecodeError("the body is empty, JSON was expected")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise DecodeError(f"JSON is nested deeper than {MAX_DEPTH} levels")
    try:
        return _decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DecodeError(f"not valid JSON: {error}") from None


def dumps(value: Any) -> bytes:
    """A value as JSON bytes; raises InvalidMessage where JSON would silently change it."""
    try:
        body = _encode_json(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessage(f"the value cannot be written as JSON: {error}") from None
    if b"null" in body and _has_non_finite(value):
        raise InvalidMessage(
            "the value contains NaN or an infinite number, which JSON cannot carry"
        )
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise InvalidMessage(f"the value is nested deeper than {MAX_DEPTH} levels")
    return body


def hash_payload(payload: Any) -> bytes:
    """SHA-256 of a payload's canonical form; also proves that the payload can be written again."""
    if isinstance(payload, bytes):
        return hashlib.sha256(payload).digest()
    try:
        return hashlib.sha256(_encode_sorted(payload)).digest()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DecodeError(f"the payload cannot be stored: {error}") from None


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """`metadata` with nothing in it but what a sender of ours writes."""

    tenant_id: str | None = None
    source: str = ""
    channel: str = ""
    idempotency_key: str | None = None
    ordering_key: str | None = None
    expires_at: str | None = None
    trace: str | None = None
    retry_count: int | msgspec.UnsetType = msgspec.UNSET


class _Wire(msgspec.Struct, forbid_unknown_fields=True):
    """The standard message with nothing in it but its own fields."""

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
    """Most messages, read in one go; None: this one has to be looked at field by field."""
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
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


_NEW_METADATA = msgspec.Raw(_encode_json({"tenant_id": DEFAULT_TENANT, "retry_count": 0}))
"""What `metadata` holds where nothing was said."""


class StandardCodec:
    """The standard message. Fields of ours that it has no place for travel in `metadata`."""

    name = "standard"
    version = VERSION
    content_type = "application/json"

    def decode(self, delivery: Delivery, sub: Subscription) -> Message:
        wire = _plain(delivery.body)
        return self._read(delivery, sub) if wire is None else self._typed(wire, delivery, sub)

    def _typed(self, wire: _Wire, delivery: Delivery, sub: Subscription) -> Message:
        """The usual message, which has no field that is not ours: read by its types at once."""
        metadata, headers = wire.metadata, delivery.headers
        count = metadata.retry_count
        trace = headers.get("traceparent") if metadata.trace is None else metadata.trace
        return Message(
            id=_short("message_id", wire.message_id),
            type=_text("message_type", wire.message_type, default=sub.default_type),
            payload=wire.payload,
            tenant_id=_tenant(metadata.tenant_id, sub),
            source=_text("source", metadata.source, default=""),
            channel=_text("channel", metadata.channel, default=""),
            priority=wire.priority if 0 <= wire.priority <= 3 else _priority(wire.priority),
            correlation_id=_optional("correlation_id", wire.correlation_id),
            trace=_optional("trace", trace),
            idempotency_key=_key("idempotency_key", metadata.idempotency_key),
            ordering_key=_key("ordering_key", metadata.ordering_key),
            created_at=_moment("timestamp", wire.timestamp) or _sent_at(delivery),
            expires_at=_moment("expires_at", metadata.expires_at),
            headers=dict(headers) if headers else {},
            metadata={} if count is msgspec.UNSET else {"retry_count": count},
            raw=_raw(self, delivery),
        )

    def _read(self, delivery: Delivery, sub: Subscription) -> Message:
        """Known fields are taken out of the object; what is left over is kept as `extra`."""
        fields = loads(delivery.body)
        if type(fields) is not dict:
            raise DecodeError("a standard message is a JSON object")
        take = fields.pop
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
        if fields:  # ours are understood at the top, too
            own = [take(n, None) if v is None else v for n, v in zip(_OURS, own, strict=True)]
        tenant_id, source, channel, idempotency_key, ordering_key, expires_at, trace = own
        headers = delivery.headers
        return Message(
            id=_id(message_id, delivery, sub),
            type=_text("message_type", message_type, default=sub.default_type),
            payload=payload,
            tenant_id=_tenant(tenant_id, sub),
            source="" if source is None else _text("source", source, default=""),
            channel="" if channel is None else _text("channel", channel, default=""),
            priority=_priority(priority),
            correlation_id=None
            if correlation_id is None
            else _optional("correlation_id", correlation_id),
            trace=_optional("trace", headers.get("traceparent") if trace is None else trace),
            idempotency_key=None
            if idempotency_key is None
            else _key("idempotency_key", idempotency_key),
            ordering_key=None if ordering_key is None else _key("ordering_key", ordering_key),
            created_at=_moment("timestamp", timestamp) or _sent_at(delivery),
            expires_at=None if expires_at is None else _moment("expires_at", expires_at),
            headers=dict(headers) if headers else {},
            metadata=metadata,
            extra=fields,
            raw=_raw(self, delivery),
        )

    def encode(self, message: Message) -> tuple[bytes, dict[str, str]]:
        if isinstance(message.payload, _BYTES):
            raise InvalidMessage(
                "a payload of bytes does not fit the standard message; use codec 'binary'"
            )
        metadata: dict[str, Any] = dict(message.metadata)
        for name, value in zip(_OURS, _ours_of(message), strict=True):
            if value is not None and value != "":
                metadata[name] = _time(value) if isinstance(value, datetime) else value
        metadata.setdefault("retry_count", message.attempt - 1)
        correlation_id = message.correlation_id
        written = _Written(
            message_id=message.id,
            correlation_id=msgspec.UNSET if correlation_id is None else correlation_id,
            message_type=message.type,
            timestamp=_time(message.created_at),
            priority=int(message.priority),
            payload=message.payload,
            metadata=metadata,
        )
        if message.extra:
            return dumps({**_fields_of(written), **message.extra}), dict(message.headers)
        return dumps(written), dict(message.headers)

    def encode_new(self, message_id: str, message_type: str, payload: Any) -> bytes:
        """The body that `encode` makes of a new message with only a type and a payload, sooner."""
        created_at = datetime.now(UTC)
        try:
            value = _encode_json(payload)
            if (
                value.count(b"[") + value.count(b"{") < MAX_DEPTH
                and not (b"null" in value and _has_non_finite(payload))
                and not isinstance(payload, _BYTES)
            ):
                written = _Written(
                    message_id=message_id,
                    message_type=message_type,
                    timestamp=created_at,
                    payload=msgspec.Raw(value),
                    metadata=_NEW_METADATA,
                )
                return _encode_json(written)
        except (TypeError, ValueError, OverflowError, RecursionError):
            pass  # `encode` says what is wrong with it
        message = Message(id=message_id, type=message_type, payload=payload, created_at=created_at)
        return self.encode(message)[0]


class _BodyCodec(ABC):
    """Forms where the body is the payload and everything else stands in headers."""

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
            id=_id(headers.get("x-message-id"), delivery, sub),
            type=_text(
                sub.type_header, headers.get(sub.type_header.lower()), default=sub.default_type
            ),
            payload=self.payload(delivery.body),
            tenant_id=_tenant(headers.get(sub.tenant_header.lower()), sub),
            source=sub.queue,
            channel=_text("x-channel", headers.get("x-channel"), default=""),
            priority=_priority(headers.get("x-priority", delivery.priority)),
            correlation_id=_optional("x-correlation-id", headers.get("x-correlation-id")),
            trace=_optional("traceparent", headers.get("traceparent")),
            idempotency_key=_key("x-dedup-key", headers.get("x-dedup-key")),
            ordering_key=_key("x-ordering-key", headers.get("x-ordering-key", delivery.key)),
            created_at=_sent_at(delivery),
            expires_at=_moment("x-expires-at", headers.get("x-expires-at")),
            headers=dict(delivery.headers),
            raw=_raw(self, delivery),
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
            "x-expires-at": _iso(message.expires_at) if message.expires_at else None,
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
            raise InvalidMessage("codec 'text' carries a str payload")
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
        if not isinstance(payload, _BYTES):
            raise InvalidMessage("codec 'binary' carries a bytes payload")
        return bytes(payload)


STANDARD = StandardCodec()
CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (STANDARD, JsonCodec(), TextCodec(), BinaryCodec())
}


def header_text(value: bytes | str) -> str:
    """A header value as text; bytes that are no UTF-8 become base64 with a `;b64` mark."""
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(value).decode("ascii") + ";b64"


def header_bytes(value: str) -> bytes:
    """The reverse of `header_text`."""
    if value.endswith(";b64"):
        try:
            return base64.b64decode(value[:-4], validate=True)
        except binascii.Error:
            pass  # a plain value that happens to end like the mark
    return value.encode("utf-8", "surrogatepass")


def _raw(codec: Codec, delivery: Delivery) -> Raw:
    return Raw(
        body=delivery.body,
        codec=codec.name,
        version=codec.version,
        content_type=codec.content_type,
        size=len(delivery.body),
    )


def _id(value: Any, delivery: Delivery, sub: Subscription) -> str:
    """The envelope's id, else the broker's own name for the message, else a new one."""
    if value is None or value == "":
        if delivery.identity is not None:
            return derived_id(sub.queue, delivery.identity)
        return new_id()
    return _short("message_id", value)


def _tenant(value: Any, sub: Subscription) -> str:
    if sub.tenant is not None:
        return sub.tenant
    if value in (None, "", DEFAULT_TENANT):
        return DEFAULT_TENANT
    if not isinstance(value, str) or len(value) > MAX_TENANT or not NAME.match(value):
        raise DecodeError(f"tenant_id {value!r:.80} is not a valid name")
    return value


def _text(name: str, value: Any, *, default: str) -> str:
    if not value and (value is None or value == ""):
        return default
    if not isinstance(value, str):
        raise DecodeError(f"{name} is not text: {value!r:.60}")
    if len(value) > MAX_ID or not value.isprintable():
        raise DecodeError(f"{name} is longer than {MAX_ID} or holds control characters")
    return value


def _optional(name: str, value: Any) -> str | None:
    return None if value is None else _text(name, value, default="") or None


def _key(name: str, value: Any) -> str | None:
    if value is None or value == "":
        return None
    return _short(name, value)


def _short(name: str, value: Any) -> str:
    """Text of a producer's own making that every database takes; a long one by its digest."""
    if not isinstance(value, str):
        raise DecodeError(f"{name} is not text: {value!r:.60}")
    if not value.isascii() or not value.isprintable():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DecodeError(f"{name} {value!r:.60} is not valid Unicode") from None
        if "\0" in value:
            raise DecodeError(f"{name} {value!r:.60} holds a NUL")
    return value if len(value) <= MAX_ID else derived_id(f"long {name}", value)


def _is_version_1(version: Any) -> bool:
    if isinstance(version, str):
        return version.partition(".")[0] == "1"
    return isinstance(version, int | float) and 1 <= version < 2


def _priority(value: Any) -> int:
    digits = type(value) is str and value.isascii() and value.isdigit() and len(value) < 10
    if digits or (type(value) is float and value.is_integer()):
        value = int(value)
    if type(value) is not int:
        raise DecodeError(f"priority is not a whole number: {value!r:.60}")
    return min(3, max(0, value))


def _moment(name: str, value: Any) -> datetime | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise DecodeError(f"{name} is no ISO 8601 time: {value!r:.60}") from None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    raise DecodeError(f"{name} is no ISO 8601 time: {value!r:.60}")


def _sent_at(delivery: Delivery) -> datetime:
    return datetime.now(UTC) if delivery.sent_at_us is None else from_us(delivery.sent_at_us)


def _time(moment: datetime) -> datetime | str:
    """What the encoder takes: it writes UTC as `_iso` does, in a tenth of the time."""
    return moment if type(moment) is datetime and moment.tzinfo is UTC else _iso(moment)


def _iso(moment: datetime) -> str:
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    return moment.isoformat()[:-6] + "Z"


def _depth(body: bytes) -> int:
    """Nesting depth of a JSON text, brackets inside strings left out."""
    deepest = depth = 0
    in_string = escaped = False
    for byte in body:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in (0x5B, 0x7B):
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                return deepest
        elif byte in (0x5D, 0x7D):
            depth -= 1
    return deepest


def _fields_of(struct: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value is not msgspec.UNSET}


def _has_non_finite(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif isinstance(item, msgspec.Struct):
            stack.extend(msgspec.structs.asdict(item).values())
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, field.name, None) for field in dataclasses.fields(item))
    return False


def stored_form(
    codec: Codec, headers: Mapping[str, str], copy: Mapping[str, Any] | None = None
) -> str:
    """What a stored body needs to be read again later, as JSON text.

    `copy`: fields of the `Delivery` that this wire form has no place for.
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
        return _encode_json(form).decode()
    except (TypeError, ValueError):  # headers that are no text: kept as well as text can show them
        form["headers"] = {_shown(name): _shown(value) for name, value in headers.items()}
        return _encode_json(form).decode()


def _shown(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()
