"""A queue's message as its adapter hands it over, and as the agent sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ackbone.core.message import DEFAULT_TENANT

from .parsers import MessageParser

DEDUP_HEADER = "x-dedup-key"
TENANT_HEADER = "x-tenant-id"
EVENT_HEADER = "x-event-name"


@dataclass
class RawMessage:
    """A message as the queue gave it."""

    message_id: str
    """The same on each redelivery: it is the message's identity."""
    body: bytes
    headers: dict[str, str]
    timestamp: datetime
    """When the queue took it in, not when it was read."""
    metadata: dict[str, Any]
    """What the adapter needs to settle it, and whatever else the queue tells."""


@dataclass
class MessageEnvelope:
    """A message in one form, whatever queue it came from."""

    message_id: str
    payload: Any
    headers: dict[str, str]
    received_at: datetime
    """The queue's own timestamp."""
    source: str
    """The queue."""
    dedup_key: str | None = None
    event_name: str | None = None
    tenant_id: str | None = None

    @classmethod
    def from_raw_message(
        cls,
        raw: RawMessage,
        source: str,
        parser: MessageParser | None = None,
        *,
        event_name_header: str = EVENT_HEADER,
    ) -> MessageEnvelope:
        """The envelope of a raw message; without a parser the payload is the body.

        Raises ParseError for a body that the parser cannot read.
        """
        return cls(
            message_id=raw.message_id,
            payload=raw.body if parser is None else parser.parse(raw.body),
            headers=raw.headers,
            received_at=raw.timestamp,
            source=source,
            dedup_key=header(raw.headers, DEDUP_HEADER),
            event_name=header(raw.headers, event_name_header),
            tenant_id=header(raw.headers, TENANT_HEADER),
        )

    @property
    def key(self) -> str:
        """What the message is deduplicated by; empty: by nothing."""
        return self.dedup_key or self.message_id

    @property
    def shared_key(self) -> str:
        """The key for a memory without tenants: `<tenant>/<key>`, or `<key>` for the default one.

        A tenant's name holds no slash, so the part before the first slash names the tenant. A key
        that holds a slash itself therefore has the default tenant's name before it, too.
        """
        tenant = self.tenant_id or DEFAULT_TENANT
        if tenant == DEFAULT_TENANT and "/" not in self.key:
            return self.key
        return f"{tenant}/{self.key}"


def header(headers: Mapping[str, str], name: str) -> str | None:
    """A header's value, whatever the case of its name; an empty one counts as absent."""
    found = headers.get(name)
    if found is None:
        wanted = name.lower()
        found = next((v for k, v in headers.items() if k.lower() == wanted), None)
    return found or None
