"""Stored bytes, read again: as the message that they were, or as bytes with the reason why not."""

from __future__ import annotations

from typing import Any

import msgspec

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codec import CODECS
from ackbone.core.errors import DecodeError
from ackbone.core.json_text import loads
from ackbone.core.message import Message

_decode_json = msgspec.json.Decoder().decode


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a body says."""

    message: Message | None = None
    codec: str | None = None
    problem: str | None = None
    """Why there is no message."""


def read_body(
    body: bytes | None,
    info: str | None,
    *,
    message_id: str,
    queue: str,
    intact: bool,
    codec: str | None = None,
) -> Reading:
    """Read a stored body by the form it was stored in, else by `codec`, the queue's of today.

    The second try is for what arrived while a queue was set to the wrong codec.
    """
    if body is None:
        return Reading(problem="its body was not kept")
    if not intact:
        return Reading(problem="its body is not the one that was written: the checksum differs")
    name, headers, problem = _form(info)
    sub = Subscription(name=queue, queue=queue)
    for each in dict.fromkeys([name, codec]):
        if each not in CODECS:
            continue
        delivery = Delivery(body=body, headers=headers, tag=None, identity=message_id)
        try:
            message = CODECS[each].decode(delivery, sub)
        except DecodeError as error:
            problem = problem or str(error)
            continue
        return Reading(message=message, codec=each)
    return Reading(codec=name, problem=problem or "how it was stored is not known")


def salvaged(body: bytes | None) -> dict[str, Any]:
    """What an unreadable body still says of its message, if it is an object with such fields."""
    try:
        found = loads(body or b"")
    except DecodeError:
        return {}
    if not isinstance(found, dict):
        return {}
    names = {
        "type": found.get("tool_name") or found.get("message_type"),
        "idempotency_key": found.get("idempotency_key"),
        "correlation_id": found.get("correlation_id"),
        "ordering_key": found.get("ordering_key"),
    }
    return {name: text for name, text in names.items() if isinstance(text, str) and text}


def read_json(value: bytes | None) -> object:
    """A stored result as a value; bytes that are no JSON as text."""
    if value is None:
        return None
    try:
        return loads(value)
    except DecodeError:
        return value.decode("utf-8", "backslashreplace")


def _form(info: str | None) -> tuple[str | None, dict[str, str], str | None]:
    try:
        form = _decode_json(info or "{}")
        headers = {str(k): str(v) for k, v in (form.get("headers") or {}).items()}
        return form.get("codec"), headers, None
    except (msgspec.DecodeError, AttributeError) as error:
        return None, {}, f"its stored form is unreadable: {error}"
