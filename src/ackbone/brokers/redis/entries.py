"""Stream entries and messages: how one is written as the other.

Our entries begin with the field `ab`. An entry of another program has fields of its own. It is
handed over as a JSON object of these fields, with the header FLAT, and published the same way.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from ackbone.core.broker import Delivery, Outgoing
from ackbone.core.clock import LAST, to_us
from ackbone.core.errors import InvalidMessage
from ackbone.core.task_protocol import FLAT, FLAT_HEADERS, FlatDelivery, FlatOutgoing

_MARK, _VERSION = b"ab", b"1"
_MARK_NAME = _MARK.decode()
_LAST_US = to_us(LAST)
MOST_DIGITS = 18
"""Longest time to live that is read, in digits of microseconds: 30,000 years."""
_encode = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_decode_fields = msgspec.json.Decoder(dict[str, str]).decode

NORMAL = 1
LEVELS = (3, 2, NORMAL, 0)
"""Priorities, the highest first. Each has a stream of its own: a stream has one order."""


def key_of(queue: str, level: int) -> str:
    """Return the name of a stream. Normal priority uses the queue's own name, which other programs
    know.

    The braces put all streams of a queue into one slot of a cluster.
    """
    return queue if level == NORMAL else f"{{{queue}}}:p{level}"


def fields_of(out: Outgoing) -> Sequence[str | bytes | int]:
    """Return the fields and values of the entry. Raises InvalidMessage."""
    if FLAT in out.headers:
        return _flat(out)
    fields: list[str | bytes | int] = [_MARK, _VERSION, "id", out.id, "body", out.body]
    if out.headers:
        fields += ["headers", _encode(dict(out.headers))]
    if out.key is not None:
        fields += ["key", out.key]
    if out.ttl_s is not None:
        fields += ["ttl_us", int(out.ttl_s * 1e6)]
    return fields


def _flat(out: Outgoing) -> Sequence[str | bytes | int]:
    found: Mapping[str, str]
    if isinstance(out, FlatOutgoing):
        found = out.fields
    else:
        try:
            found = _decode_fields(out.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidMessage(f"{out.id}: not a JSON object of texts: {error}") from None
    if not found:
        raise InvalidMessage(f"{out.id}: an entry needs at least one field")
    return tuple(chain.from_iterable(found.items()))


def delivery_of(
    queue: str, level: int, entry: bytes, fields: list[bytes] | None, count: int
) -> Delivery:
    """Read an entry. `fields` is None if the entry was deleted while it was pending."""
    id_us = int(entry.partition(b"-")[0]) * 1000
    # A later time comes from a producer that makes its own ids, on another scale.
    sent_at_us = id_us if id_us <= _LAST_US else None
    fields = fields or []
    named = None if fields[:1] == [_MARK] else _named(fields)
    if named is None or _MARK_NAME in named:
        pairs = dict(zip(fields[::2], fields[1::2], strict=True))
        if pairs.get(_MARK) == _VERSION and b"body" in pairs:
            return _ours(pairs, (level, entry), sent_at_us, count)
        named = _named(fields)
    if named is None:
        return Delivery(
            body=_body_of_bytes(fields),
            headers=FLAT_HEADERS,
            tag=(level, entry),
            identity=f"{queue}/{_name_of(level, entry)}",
            count=count,
            sent_at_us=sent_at_us,
            priority=level,
        )
    return FlatDelivery(
        body=_encode(named),
        headers=FLAT_HEADERS,
        tag=(level, entry),
        identity=f"{queue}/{_name_of(level, entry)}",
        count=count,
        sent_at_us=sent_at_us,
        priority=level,
        fields=named,
    )


def _ours(
    pairs: dict[bytes, bytes], tag: tuple[int, bytes], sent_at_us: int | None, count: int
) -> Delivery:
    level, entry = tag
    ttl = pairs.get(b"ttl_us")
    key = pairs.get(b"key")
    given = pairs.get(b"id")
    return Delivery(
        body=pairs[b"body"],
        headers=_headers(pairs.get(b"headers")),
        tag=tag,
        identity=_name_of(level, entry) if given is None else given.decode("utf-8", "replace"),
        count=count,
        sent_at_us=sent_at_us,
        priority=level,
        key=None if key is None else key.decode("utf-8", "replace"),
        expires_at_us=None if ttl is None or sent_at_us is None else _expiry(sent_at_us, ttl),
    )


def _name_of(level: int, entry: bytes) -> str:
    """Return the identity of an entry within its queue. Two streams may use the same entry id."""
    return entry.decode() if level == NORMAL else f"p{level}/{entry.decode()}"


def _expiry(sent_at_us: int, ttl: bytes) -> int | None:
    """Return when the entry expires, by the server's clock, which also made its id.

    Another program may write a number of any length. One that no store can keep never expires."""
    if not ttl.isdigit() or len(ttl) > MOST_DIGITS:
        return None
    expires_us = sent_at_us + int(ttl)
    return expires_us if expires_us <= _LAST_US else None


def _named(fields: list[bytes]) -> dict[str, str] | None:
    """Return the fields of an entry, or None if one of them is not text."""
    try:
        texts = b"\0".join(fields).decode().split("\0")  # faster than one by one
        if len(texts) != len(fields):  # one of them contains a NUL
            texts = [part.decode() for part in fields]
    except UnicodeDecodeError:
        return None
    each = iter(texts)
    return dict(zip(each, each, strict=True))


def _body_of_bytes(fields: list[bytes]) -> bytes:
    """Return the fields of an entry as a JSON object, if not all of them are text."""
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return _encode({_text(name): _value(value) for name, value in pairs})


def _headers(written: bytes | None) -> dict[str, str]:
    if written is None:
        return {}
    try:
        return _decode_headers(written)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _value(value: bytes) -> Any:
    """Return text, or an object that holds the bytes in base64."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
