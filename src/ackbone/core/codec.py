"""Wire forms as codecs over `Message`. Unknown fields survive; what cannot be read: DecodeError.

| codec      | wire form                                                                  |
|------------|----------------------------------------------------------------------------|
| `standard` | the standard message: message_id, message_type, payload, metadata, …       |
| `json`     | the body is the payload, any JSON value; type and tenant come from headers |
| `text`     | the body is the payload, UTF-8 text                                        |
| `binary`   | the body is the payload, bytes                                             |
| `task`     | the task protocol: task_id, tool_name, payload, … as flat fields           |
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from .body_codecs import BinaryCodec, JsonCodec, TextCodec
from .broker import Delivery, Subscription
from .message import Message
from .standard_codec import StandardCodec
from .task_codec import TaskCodec

_encode = msgspec.json.Encoder().encode


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


STANDARD, TASK = StandardCodec(), TaskCodec()
CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (STANDARD, JsonCodec(), TextCodec(), BinaryCodec(), TASK)
}


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
        return _encode(form).decode()
    except (TypeError, ValueError):  # headers that are no text: kept as well as text can show them
        form["headers"] = {_shown(name): _shown(value) for name, value in headers.items()}
        return _encode(form).decode()


def _shown(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


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
