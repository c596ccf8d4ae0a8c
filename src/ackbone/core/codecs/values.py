"""Values of the wire forms: JSON texts, and fields that are checked as they are read.

A DecodeError names the field that is wrong. Deep nesting, huge numbers, NaN and invalid text are
refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.clock import LAST, from_us
from ackbone.core.errors import DecodeError, InvalidMessage, InvalidResult
from ackbone.core.ids import derived_id, new_id
from ackbone.core.message import DEFAULT_TENANT, MAX_ID, MAX_TENANT, NAME, Raw

# -- JSON ------------------------------------------------------------------------------------------

MAX_DEPTH = 64
_decode = msgspec.json.Decoder().decode
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ROUND = bytes.maketrans(b"[{]}", b"(())")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def json_value(value: Any) -> Any:
    """Return the JSON value of a pydantic model, which msgspec does not know.

    Models are recognized by their method, so that pydantic need not be installed. Raises TypeError
    for other objects.
    """
    dump = getattr(type(value), "model_dump", None)
    if not callable(dump):
        kind = type(value)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a JSON value")
    return dump(value, mode="json")


encode = msgspec.json.Encoder(enc_hook=json_value).encode
"""Writes values of users as JSON. Dataclasses, msgspec structs and pydantic models become objects.
Use `dumps` for a value that has not been checked."""
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def is_model(value: Any) -> bool:
    """Return True for an instance of a dataclass, a msgspec struct or a pydantic model."""
    if isinstance(value, type):
        return False
    return (
        isinstance(value, msgspec.Struct)
        or dataclasses.is_dataclass(value)
        or callable(getattr(type(value), "model_dump", None))
    )


def loads(body: bytes) -> Any:
    """Read JSON as a plain value. Raises DecodeError for deep nesting, huge numbers and bad
    text."""
    if not body:
        raise DecodeError("the body is empty, JSON was expected")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise DecodeError(f"JSON is nested deeper than {MAX_DEPTH} levels")
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DecodeError(f"not valid JSON: {error}") from None


def loads_text(text: str) -> Any:
    """As `loads`, for a text, without encoding it first."""
    if not text:
        raise DecodeError("the text is empty, JSON was expected")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        return loads(text.encode("utf-8", "surrogatepass"))
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise DecodeError(f"not valid JSON: {error}") from None


def dumps(value: Any) -> bytes:
    """Write a value as JSON. Raises InvalidMessage if JSON would silently change it."""
    try:
        body = encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessage(f"the value cannot be written as JSON: {error}") from None
    if b"null" in body and has_non_finite(value):
        raise InvalidMessage(
            "the value contains NaN or an infinite number, which JSON cannot carry"
        )
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise InvalidMessage(f"the value is nested deeper than {MAX_DEPTH} levels")
    return body


def result_bytes(result: Any) -> bytes | None:
    """Write a handler's result as JSON. None stays None. Raises InvalidResult."""
    if result is None:
        return None
    try:
        return dumps(result)
    except InvalidMessage as error:
        raise InvalidResult(
            f"the handler returned a {type(result).__name__}, but {error}. Return None, a value of "
            "dicts, lists, texts, numbers and booleans, a dataclass, a msgspec struct or a "
            "pydantic model"
        ) from None


def hash_payload(payload: Any) -> bytes:
    """Return the SHA-256 of a payload. This also proves that the payload can be written again."""
    if isinstance(payload, bytes):
        return hashlib.sha256(payload).digest()
    try:
        return hashlib.sha256(_encode_sorted(payload)).digest()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DecodeError(f"the payload cannot be stored: {error}") from None


def has_non_finite(value: Any) -> bool:
    """Return True if the value contains NaN or an infinite number, which JSON does not have."""
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
        elif is_model(item):
            stack.append(json_value(item))
    return False


def _depth(body: bytes) -> int:
    """Return the nesting depth of a JSON text. Brackets inside strings do not count."""
    left = _STRINGS.sub(b"", body).translate(_ROUND, _NO_BRACKETS)
    depth = 0
    while b"()" in left and depth <= MAX_DEPTH:  # the innermost pairs
        left = left.replace(b"()", b"")
        depth += 1
    return depth + left.count(b"(")


# -- fields ----------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from .base import Codec


def raw_of(codec: Codec, delivery: Delivery) -> Raw:
    """Return the received bytes, and how they were read."""
    return Raw(
        body=delivery.body,
        codec=codec.name,
        version=codec.version,
        content_type=codec.content_type,
        size=len(delivery.body),
    )


def id_of(value: Any, delivery: Delivery, sub: Subscription) -> str:
    """Return the envelope's id, else one derived from the broker's identity, else a new one."""
    if value is None or value == "":
        if delivery.identity is not None:
            return derived_id(sub.queue, delivery.identity)
        return new_id()
    return short("message_id", value)


def tenant_of(value: Any, sub: Subscription) -> str:
    """Return the tenant: that of the subscription, else that of the message, else the default."""
    return named_tenant(value) if sub.tenant is None else sub.tenant


def named_tenant(value: Any) -> str:
    """Return the tenant that a message names, or the default tenant if it names none."""
    if value in (None, "", DEFAULT_TENANT):
        return DEFAULT_TENANT
    if not isinstance(value, str) or len(value) > MAX_TENANT or not NAME.match(value):
        raise DecodeError(f"tenant_id {value!r:.80} is not a valid name")
    return value


def text(name: str, value: Any, *, default: str) -> str:
    """Return a short, printable text. A missing or empty value gives the default."""
    if not value and (value is None or value == ""):
        return default
    if not isinstance(value, str):
        raise DecodeError(f"{name} is not text: {value!r:.60}")
    if len(value) > MAX_ID or not value.isprintable():
        raise DecodeError(f"{name} is longer than {MAX_ID} or contains control characters")
    return value


def optional(name: str, value: Any) -> str | None:
    """As `text`. A missing or empty value gives None."""
    return None if value is None else text(name, value, default="") or None


def header_trace(headers: Mapping[str, str]) -> str | None:
    """Return `traceparent`. A broken one is ignored, as its standard requires."""
    found = headers.get("traceparent")
    return found if found and len(found) <= MAX_ID and found.isprintable() else None


def key(name: str, value: Any) -> str | None:
    """Return an idempotency or ordering key."""
    if value is None or value == "":
        return None
    return short(name, value)


def short(name: str, value: Any) -> str:
    """Return a sender's text that every database accepts. A long one is replaced by its digest."""
    if not isinstance(value, str):
        raise DecodeError(f"{name} is not text: {value!r:.60}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DecodeError(f"{name} {value!r:.60} is not valid Unicode") from None
    if "\0" in value:
        raise DecodeError(f"{name} {value!r:.60} contains a NUL")
    return value if len(value) <= MAX_ID else derived_id(f"long {name}", value)


def priority_of(value: Any) -> int:
    """Return a priority, limited to 0 to 3."""
    if type(value) is int and 0 <= value <= 3:  # nearly always
        return value
    digits = type(value) is str and value.isascii() and value.isdigit() and len(value) < 10
    if type(value) is not int and not digits and not (type(value) is float and value.is_integer()):
        raise DecodeError(f"priority is not a whole number: {value!r:.60}")
    return min(3, max(0, int(value)))


def moment(name: str, value: Any) -> datetime | None:
    """Read an ISO 8601 time. Without a zone it is UTC."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            raise DecodeError(f"{name} is not an ISO 8601 time: {value!r:.60}") from None
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return found if 1 < found.year < 9999 else _in_utc(found)
    raise DecodeError(f"{name} is not an ISO 8601 time: {value!r:.60}")


def _in_utc(found: datetime) -> datetime:
    """Limit a time near year 1 or year 9999 to what every database can store and read again.

    In UTC, or rounded by a database, it could fall outside these years. A late one means "for
    ever"."""
    try:
        return min(found.astimezone(UTC), LAST)
    except OverflowError:
        return LAST if found.year > 1 else datetime.min.replace(tzinfo=UTC)


def sent_at(delivery: Delivery) -> datetime:
    """Return when the broker accepted the message, for messages without a time of their own."""
    return datetime.now(UTC) if delivery.sent_at_us is None else from_us(delivery.sent_at_us)


def time_of(moment: datetime) -> datetime | str:
    """Return a value for the encoder, which writes UTC as `iso` does, ten times as fast."""
    return moment if type(moment) is datetime and moment.tzinfo is UTC else iso(moment)


def iso(moment: datetime) -> str:
    """Return a time as all wire forms write it."""
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    return moment.isoformat()[:-6] + "Z"


def iso_us(us: int) -> str:
    """As `iso`, for microseconds since 1970."""
    second, rest = divmod(us, 1_000_000)
    # `zfill` takes a quarter of the time of a format string. Every result needs this.
    return f"{_iso_second(second)}.{str(rest).zfill(6)}Z" if rest else f"{_iso_second(second)}Z"


@functools.lru_cache(maxsize=16)
def _iso_second(second: int) -> str:
    """Cached: most times of a batch fall into the same second."""
    return from_us(second * 1_000_000).isoformat()[:-6]
