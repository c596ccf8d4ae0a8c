"""The base class of codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ackbone.core.broker import Delivery, Outgoing, Subscription
from ackbone.core.message import Message


class Codec(ABC):
    """One wire form."""

    name = ""
    version = ""
    content_type = ""
    headers: Mapping[str, str] = {}
    """The headers of a message that has none of its own."""

    @abstractmethod
    def decode(self, delivery: Delivery, sub: Subscription) -> Message:
        """Read a delivery. Raises DecodeError, and nothing else, if the bytes are not a message."""

    @abstractmethod
    def encode(self, message: Message) -> tuple[bytes, dict[str, str]]:
        """Return body and headers. Raises InvalidMessage if this form would change the message."""

    def outgoing(
        self, message: Message, *, delay_s: float = 0.0, ttl_s: float | None = None
    ) -> Outgoing:
        """Return the message to publish. Raises InvalidMessage as `encode` does."""
        body, headers = self.encode(message)
        return Outgoing(
            id=message.id,
            body=body,
            headers=headers,
            priority=int(message.priority),
            delay_s=delay_s,
            ttl_s=ttl_s,
            key=message.ordering_key,
        )

    def new(self, message_id: str, message_type: str, payload: Any) -> Outgoing:
        """As `outgoing`, for a new message with only a type and a payload."""
        return self.outgoing(Message(id=message_id, type=message_type, payload=payload))
