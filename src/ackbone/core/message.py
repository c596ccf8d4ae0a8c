"""`Message`: the form of every message inside ackbone, whatever its wire form was."""

from __future__ import annotations

import re
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

import msgspec

from .errors import InvalidMessage
from .ids import new_id

DEFAULT_TENANT = "default"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}\Z")
MAX_ID = 255
MAX_TENANT = 64


class Priority(IntEnum):
    """Messages of higher priority run first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """The received bytes, and how they were read."""

    body: bytes
    codec: str
    version: str = "1"
    content_type: str = "application/json"
    key_id: str | None = None
    size: int = 0
    truncated: bool = False
    sha256: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message. It is frozen: `msgspec.structs.replace` makes a changed copy."""

    type: str
    payload: Any = None
    id: str = msgspec.field(default_factory=new_id)
    tenant_id: str = DEFAULT_TENANT
    source: str = ""
    channel: str = ""
    priority: int = Priority.NORMAL
    correlation_id: str | None = None
    trace: str | None = None
    """The W3C `traceparent`."""
    idempotency_key: str | None = None
    ordering_key: str | None = None
    """Messages with the same key are a conversation: they run one after the other, in order."""
    created_at: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))
    expires_at: datetime | None = None
    attempt: int = 1
    headers: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    """Fields of the wire form that this version does not know. They are kept and written back."""
    raw: Raw | None = None

    @property
    def trace_id(self) -> str:
        """The trace id of `traceparent`, or one derived from the message id."""
        if self.trace is not None:
            parts = self.trace.split("-")
            if len(parts) >= 4 and len(parts[1]) == 32:
                return parts[1]
        return f"queue-{self.id}"


current_message: ContextVar[Message | None] = ContextVar("ackbone_message", default=None)
"""The message that the running code works for. Log records take their trace from it."""


def check_name(kind: str, value: Any, *, longest: int = 128) -> str:
    """Return a name that is safe in keys, paths and logs. Raises InvalidMessage."""
    if not isinstance(value, str) or len(value) > longest or not NAME.match(value):
        raise InvalidMessage(
            f"{kind} {value!r:.150} is not a valid name: use 1 to {longest} letters, digits, "
            "'.', '_', ':' or '-', beginning with a letter or a digit"
        )
    return value
