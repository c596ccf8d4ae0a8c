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

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.message import Message

from .body import BinaryCodec, JsonCodec, TextCodec
from .standard import StandardCodec
from .task import TaskCodec

_encode = msgspec.json.Encoder().encode


class Codec(Protocol):
    """One wire form."""

    name: str
    version: str
    content_type: str

    def decode(self, delivery: Delivery, sub: Subscription) -> Message:
        """Read a delivery. Raises DecodeError, and nothing else, if the bytes are not a message."""
        ...

    def encode(self, message: Message) -> tuple[bytes, dict[str, str]]:
        """Return body and headers. Raises InvalidMessage if this form would change the message."""
        ...


STANDARD, TASK = StandardCodec(), TaskCodec()
CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (STANDARD, JsonCodec(), TextCodec(), BinaryCodec(), TASK)
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
        form["headers"] = {_shown(name): _shown(value) for name, value in headers.items()}
        return _encode(form).decode()


def _shown(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()
