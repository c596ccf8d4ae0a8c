"""Changes that an operator makes to a message before it is sent again.

A change has a path: `payload`, `payload.address.city`, `headers.x-region`, `type` or
`idempotency_key`. It changes only this field, as a merge patch does, so that one change repairs a
thousand dead letters with the same fault. A dot in a name is written `\\.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ackbone.core.errors import Conflict, InvalidMessage
from ackbone.core.message import Message

GONE = msgspec.UNSET
"""The value of a change that removes its field."""
_PART = re.compile(r"(?:[^.\\]|\\.)+")
_HEADERS = "headers."
_TEXTS = ("type", "idempotency_key")


class Change(msgspec.Struct, frozen=True):
    """The path of a field, and its new value."""

    path: str
    value: Any = GONE

    def __post_init__(self) -> None:
        """Raise InvalidMessage if no message can have this field."""
        root, *_ = self.parts
        if root not in ("payload", "headers", *_TEXTS):
            raise InvalidMessage(
                f"{self.path!r} cannot be changed; write payload, "
                "payload.FIELD, headers.NAME, type or idempotency_key"
            )
        if root in _TEXTS and (self.path != root or not (self.value and type(self.value) is str)):
            raise InvalidMessage(f"{root} must be a text that is not empty, and has no fields")
        if root == "headers":
            if len(self.parts) != 2 or not self.parts[1]:
                raise InvalidMessage(f"{self.path!r}: write headers.NAME")
            if self.value is not GONE and not isinstance(self.value, str):
                raise InvalidMessage(f"{self.path!r}: the value of a header must be text")

    @property
    def parts(self) -> Sequence[str]:
        if self.path.startswith(_HEADERS):  # names of headers may have dots in them
            return ("headers", self.path.removeprefix(_HEADERS))
        found = _PART.findall(self.path)
        if not found or ".".join(found) != self.path:
            raise InvalidMessage(
                f"{self.path!r} is not a path; write for example payload.address.city"
            )
        return [re.sub(r"\\(.)", r"\1", part) for part in found]


def repaired(message: Message, changes: Sequence[Change]) -> Message:
    """Return the message with the changes applied in order. Raises Conflict if one does not fit."""
    for change in changes:
        match change.parts:
            case ["type" | "idempotency_key" as name]:
                message = msgspec.structs.replace(message, **{name: change.value})
            case ["headers", name]:
                message = msgspec.structs.replace(
                    message, headers=_with(message.headers, name, change.value)
                )
            case ["payload"]:
                payload = None if change.value is GONE else change.value
                message = msgspec.structs.replace(message, payload=payload)
            case [_, *inside]:
                payload = _changed(message.payload, inside, change)
                message = msgspec.structs.replace(message, payload=payload)
    return message


def _changed(value: Any, parts: Sequence[str], change: Change) -> Any:
    """Return a changed copy of the value; missing objects on the path are created."""
    if not isinstance(value, Mapping):
        raise Conflict(
            f"{change.path} does not fit: {parts[0]!r} would be a field of {_kind(value)}, "
            "and only an object has fields"
        )
    name, *rest = parts
    if not rest:
        return _with(value, name, change.value)
    if name not in value and change.value is GONE:
        return value
    return _with(value, name, _changed(value.get(name, {}), rest, change))


def _with(found: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    others = {key: each for key, each in found.items() if key != name}
    return others if value is GONE else {**found, name: value}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list"
    return {str: "a text", bool: "a boolean", bytes: "bytes"}.get(type(value), "a number")
