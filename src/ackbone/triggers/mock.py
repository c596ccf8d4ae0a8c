"""A queue in memory, for tests and dry runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from .messages import RawMessage


class MockQueueAdapter:
    """Implements `QueueAdapter`, and records how each message was settled."""

    def __init__(self) -> None:
        self._messages: deque[RawMessage] = deque()
        self._connected = False
        self._acked: list[str] = []
        self._nacked: list[str] = []
        self._dlq: list[tuple[RawMessage, str]] = []
        self._arrived = asyncio.Event()
        self._settled = asyncio.Event()

    # -- for the trigger --------------------------------------------------------------------------

    async def connect(self) -> None:
        self._connected = True

    async def consume(self) -> AsyncIterator[RawMessage]:
        while self._connected:
            if self._messages:
                yield self._messages.popleft()
            else:
                self._arrived.clear()
                await self._arrived.wait()

    async def ack(self, message: RawMessage) -> None:
        self._acked.append(message.message_id)
        self._settled.set()

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        self._nacked.append(message.message_id)
        if requeue:
            self.enqueue(message)
        self._settled.set()

    async def send_to_dlq(self, message: RawMessage, reason: str) -> None:
        self._dlq.append((message, reason))
        self._settled.set()

    async def close(self) -> None:
        self._connected = False
        self._arrived.set()

    async def health_check(self) -> bool:
        return self._connected

    # -- for tests --------------------------------------------------------------------------------

    def enqueue(self, message: RawMessage) -> None:
        """Add a message to the queue."""
        self._messages.append(message)
        self._arrived.set()

    @property
    def waiting(self) -> int:
        """Number of messages that were not delivered yet, or were requeued."""
        return len(self._messages)

    def get_acked(self) -> list[str]:
        """Ids of acknowledged messages, in order."""
        return self._acked.copy()

    def get_nacked(self) -> list[str]:
        """Ids of refused messages, in order."""
        return self._nacked.copy()

    def get_dlq(self) -> list[tuple[RawMessage, str]]:
        """Messages in the dead-letter queue, each with its reason."""
        return self._dlq.copy()

    async def wait_settled(self, count: int, *, timeout: float = 30.0) -> None:
        """Wait until `count` messages in all were acked, nacked or dead-lettered."""
        async with asyncio.timeout(timeout):
            while len(self._acked) + len(self._nacked) + len(self._dlq) < count:
                self._settled.clear()
                await self._settled.wait()
