"""A message as the adapter delivers it and as the agent sees it, and the parsers of bodies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ackbone.core.codecs.values import loads
from ackbone.core.errors import DecodeError, ParseError
from ackbone.core.message import DEFAULT_TENANT

# -- parsers ---------------------------------------------------------------------------------------


class MessageParser(ABC):
    """Reads one kind of body. It accepts exactly what the engine's codec of that name accepts."""

    @abstractmethod
    def parse(self, body: bytes) -> Any:
        """Return the body's value. Raises ParseError, and nothing else, for other bytes."""


class JSONParser(MessageParser):
    """Any JSON value, except NaN, deep nesting and numbers that would change."""

    def parse(self, body: bytes) -> Any:
        try:
            return loads(body)
        except DecodeError as error:
            raise ParseError(f"Failed to parse JSON: {error}") from None


class TextParser(MessageParser):
    """UTF-8 text."""

    def parse(self, body: bytes) -> str:
        try:
            return body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ParseError(f"Failed to decode text: {error}") from None


class BinaryParser(MessageParser):
    """The unchanged bytes."""

    def parse(self, body: bytes) -> bytes:
        return body


PARSER_OF: dict[str, MessageParser] = {
    "json": JSONParser(),
    "text": TextParser(),
    "binary": BinaryParser(),
}
"""The parser for each `parser_type`, which is also the name of the engine's codec."""


# -- messages --------------------------------------------------------------------------------------

DEDUP_HEADER = "x-dedup-key"
TENANT_HEADER = "x-tenant-id"
EVENT_HEADER = "x-event-name"


@dataclass
class RawMessage:
    """A message as the queue delivered it."""

    message_id: str
    """The message's identity, the same on each redelivery."""
    body: bytes
    headers: dict[str, str]
    timestamp: datetime
    """When the queue accepted the message, not when it was read."""
    metadata: dict[str, Any]
    """Data that the adapter needs to settle the message, and other data of the queue."""


@dataclass
class MessageEnvelope:
    """A message in the same form for every kind of queue."""

    message_id: str
    payload: Any
    headers: dict[str, str]
    received_at: datetime
    """The queue's own timestamp."""
    source: str
    """Name of the queue."""
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
        """Return the envelope of a raw message. Without a parser the payload is the body.

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
        """The key for dedup. Empty: the message is not deduplicated."""
        return self.dedup_key or self.message_id

    @property
    def shared_key(self) -> str:
        """Return the key for a dedup store without tenants: `<tenant>/<key>`, or `<key>` for the
        default tenant.

        A tenant's name contains no slash, so the part before the first slash is the tenant. A key
        that itself contains a slash gets the default tenant's name, too.
        """
        tenant = self.tenant_id or DEFAULT_TENANT
        if tenant == DEFAULT_TENANT and "/" not in self.key:
            return self.key
        return f"{tenant}/{self.key}"


def header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header's value. Names are compared without case; an empty value counts as absent."""
    found = headers.get(name)
    if found is None:
        wanted = name.lower()
        found = next((v for k, v in headers.items() if k.lower() == wanted), None)
    return found or None
