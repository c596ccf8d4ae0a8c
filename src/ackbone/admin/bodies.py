"""Decode stored bodies again: the message, or the reason why the bytes are not one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.codecs.values import loads
from ackbone.core.errors import DecodeError
from ackbone.core.message import Message
from ackbone.core.records import DeadLetter, Task

_decode_json = msgspec.json.Decoder().decode


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded body."""

    message: Message | None = None
    codec: str | None = None
    problem: str | None = None
    """Why the body could not be decoded."""


def read_body(stored: Task | DeadLetter, codec: str) -> Reading:
    """Decode a stored body with the codec it was stored with, else with `codec`.

    `codec` is the current codec of the queue. It decodes messages that arrived while the queue was
    configured with the wrong codec.
    """
    if stored.body is None:
        return Reading(problem="the body was not kept")
    if not stored.intact:
        return Reading(problem="the body was changed after it was written: the checksum differs")
    name, headers, problem = _form(stored.body_info)
    delivery = Delivery(body=stored.body, headers=headers, tag=None, identity=stored.message_id)
    found = decoded(delivery, stored.queue, [name, codec])
    if found.message is not None:
        return found
    problem = problem or found.problem or "the codec of the stored body is unknown"
    return Reading(codec=name, problem=problem)


def decoded(delivery: Delivery, queue: str, codecs: Sequence[str | None]) -> Reading:
    """Decode a body with the first of the codecs that can; the problem is that of the first one."""
    problem = None
    sub = Subscription(name=queue, queue=queue)
    for codec in dict.fromkeys(codecs):
        if codec not in CODECS:
            continue
        try:
            return Reading(message=CODECS[codec].decode(delivery, sub), codec=codec)
        except DecodeError as error:
            problem = problem or str(error)
    return Reading(problem=problem)


def salvaged(body: bytes | None) -> dict[str, Any]:
    """Return the fields of the message that an undecodable body still has, if it is an object."""
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


def _form(info: str | None) -> tuple[str | None, dict[str, str], str | None]:
    try:
        form = _decode_json(info or "{}")
        headers = {str(k): str(v) for k, v in (form.get("headers") or {}).items()}
        return form.get("codec"), headers, None
    except (msgspec.DecodeError, AttributeError) as error:
        return None, {}, f"the description of the stored body cannot be read: {error}"
