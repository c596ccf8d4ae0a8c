"""`Message`: the one form every message has inside ackbone, whatever wire it came over."""

from __future__ import annotations

import re
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
    """Who goes first when work waits."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes as they were received, and how they were read."""

    body: bytes
    codec: str
    version: str = "1"
    content_type: str = "application/json"
    key_id: str | None = None
    size: int = 0
    truncated: bool = False
    sha256: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Frozen: a changed message is a new one (`msgspec.structs.replace`)."""

    type: str
    payload: Any = None
    id: str = msgspec.field(default_factory=new_id)
    tenant_id: str = DEFAULT_TENANT
    source: str = ""
    channel: str = ""
    priority: int = Priority.NORMAL
    correlation_id: str | None = None
    trace: str | None = None
    """W3C traceparent."""
    idempotency_key: str | None = None
    ordering_key: str | None = None
    """The conversation: messages with the same key run one after the other, in order."""
    created_at: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))
    expires_at: datetime | None = None
    attempt: int = 1
    headers: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    """Fields of the wire form that this version does not know; kept and written back."""
    raw: Raw | None = None

    @property
    def trace_id(self) -> str:
        """The trace it belongs to: traceparent's id, or one derived from the message id."""
        if self.trace is not None:
            parts = self.trace.split("-")
            if len(parts) >= 4 and len(parts[1]) == 32:
                return parts[1]
        return f"queue-{self.id}"


def check_name(kind: str, value: Any, *, longest: int = 128) -> str:
    """A queue, tenant, subscription or type name that is safe in keys, paths and logs."""
    if not isinstance(value, str) or len(value) > longest or not NAME.match(value):
        raise InvalidMessage(
            f"{kind} {value!r:.150} is not a valid name: use 1 to {longest} letters, digits, "
            "'.', '_', ':' or '-', beginning with a letter or a digit"
        )
    return value
