"""Fields of a wire form, each checked as it is read: DecodeError says which one is wrong."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .broker import Delivery, Subscription
from .clock import LAST, from_us
from .errors import DecodeError
from .ids import derived_id, new_id
from .message import DEFAULT_TENANT, MAX_ID, MAX_TENANT, NAME, Raw

if TYPE_CHECKING:
    from .codec import Codec


def raw_of(codec: Codec, delivery: Delivery) -> Raw:
    """The bytes as received, and how they were read."""
    return Raw(
        body=delivery.body,
        codec=codec.name,
        version=codec.version,
        content_type=codec.content_type,
        size=len(delivery.body),
    )


def id_of(value: Any, delivery: Delivery, sub: Subscription) -> str:
    """The envelope's id, else the broker's own name for the message, else a new one."""
    if value is None or value == "":
        if delivery.identity is not None:
            return derived_id(sub.queue, delivery.identity)
        return new_id()
    return short("message_id", value)


def tenant_of(value: Any, sub: Subscription) -> str:
    """Whose message it is: the subscription says so, else the message, else nobody."""
    return named_tenant(value) if sub.tenant is None else sub.tenant


def named_tenant(value: Any) -> str:
    """The tenant that a wire form names; the usual one if it names none."""
    if value in (None, "", DEFAULT_TENANT):
        return DEFAULT_TENANT
    if not isinstance(value, str) or len(value) > MAX_TENANT or not NAME.match(value):
        raise DecodeError(f"tenant_id {value!r:.80} is not a valid name")
    return value


def text(name: str, value: Any, *, default: str) -> str:
    """Short and printable, as names are."""
    if not value and (value is None or value == ""):
        return default
    if not isinstance(value, str):
        raise DecodeError(f"{name} is not text: {value!r:.60}")
    if len(value) > MAX_ID or not value.isprintable():
        raise DecodeError(f"{name} is longer than {MAX_ID} or holds control characters")
    return value


def optional(name: str, value: Any) -> str | None:
    """`text` that may be missing."""
    return None if value is None else text(name, value, default="") or None


def header_trace(headers: Mapping[str, str]) -> str | None:
    """`traceparent` of the transport; a broken one is ignored, as its standard asks for."""
    found = headers.get("traceparent")
    return found if found and len(found) <= MAX_ID and found.isprintable() else None


def key(name: str, value: Any) -> str | None:
    """An idempotency or ordering key."""
    if value is None or value == "":
        return None
    return short(name, value)


def short(name: str, value: Any) -> str:
    """Text of a producer's own making that every database takes; a long one by its digest."""
    if not isinstance(value, str):
        raise DecodeError(f"{name} is not text: {value!r:.60}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DecodeError(f"{name} {value!r:.60} is not valid Unicode") from None
    if "\0" in value:
        raise DecodeError(f"{name} {value!r:.60} holds a NUL")
    return value if len(value) <= MAX_ID else derived_id(f"long {name}", value)


def priority_of(value: Any) -> int:
    """0 to 3, whatever beyond it was asked for."""
    if type(value) is int and 0 <= value <= 3:  # nearly always
        return value
    digits = type(value) is str and value.isascii() and value.isdigit() and len(value) < 10
    if type(value) is not int and not digits and not (type(value) is float and value.is_integer()):
        raise DecodeError(f"priority is not a whole number: {value!r:.60}")
    return min(3, max(0, int(value)))


def moment(name: str, value: Any) -> datetime | None:
    """An ISO 8601 time; without a zone it is UTC."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            raise DecodeError(f"{name} is no ISO 8601 time: {value!r:.60}") from None
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return found if 1 < found.year < 9999 else _in_utc(found)
    raise DecodeError(f"{name} is no ISO 8601 time: {value!r:.60}")


def _in_utc(found: datetime) -> datetime:
    """At either end of time UTC has no year for it, or a database none once it has rounded it: its
    row could not be read again. It means "for ever", and is the last moment that all can tell."""
    try:
        return min(found.astimezone(UTC), LAST)
    except OverflowError:
        return LAST if found.year > 1 else datetime.min.replace(tzinfo=UTC)


def sent_at(delivery: Delivery) -> datetime:
    """When the broker took it, for messages that do not say it themselves."""
    return datetime.now(UTC) if delivery.sent_at_us is None else from_us(delivery.sent_at_us)


def time_of(moment: datetime) -> datetime | str:
    """What the encoder takes: it writes UTC as `iso` does, in a tenth of the time."""
    return moment if type(moment) is datetime and moment.tzinfo is UTC else iso(moment)


def iso(moment: datetime) -> str:
    """A time as all wire forms write it."""
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    return moment.isoformat()[:-6] + "Z"


def iso_us(us: int) -> str:
    """The same of microseconds since 1970."""
    second, rest = divmod(us, 1_000_000)
    # `zfill`: a format of its own takes four times as long, and this is written of every result.
    return f"{_iso_second(second)}.{str(rest).zfill(6)}Z" if rest else f"{_iso_second(second)}Z"


@functools.lru_cache(maxsize=16)
def _iso_second(second: int) -> str:
    """Most of what is written in one batch is of one second."""
    return from_us(second * 1_000_000).isoformat()[:-6]
