"""A trigger's queues that come with ackbone: one of a broker, and one in memory for tests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from ackbone.core.broker import Broker, Delivery, Outgoing, Settlement, Source, Subscription, Verb
from ackbone.core.clock import from_us
from ackbone.core.ids import new_id

from .messages import RawMessage

_DELIVERY = "delivery"
WAIT_S = 1.0
BATCH = 50


class BrokerQueueAdapter:
    """Implements `QueueAdapter` for one queue of a broker. Dead letters go to `<queue>-dlq`."""

    def __init__(self, broker: Broker, queue: str, *, group: str = "ackbone") -> None:
        self._broker = broker
        self._subscription = Subscription(name=f"{queue}/{group}", queue=queue, group=group)
        self._source: Source | None = None

    async def connect(self) -> None:
        await self._broker.open()
        self._source = await self._broker.subscribe(self._subscription, room=BATCH)

    async def consume(self) -> AsyncIterator[RawMessage]:
        while self._source is not None:
            batch = await self._source.receive(limit=BATCH, wait=WAIT_S)
            for delivery in batch:  # deliveries that are not consumed return to the queue at close
                yield _raw(delivery)

    async def ack(self, message: RawMessage) -> None:
        await self._settle(Verb.ACK, message)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        if requeue:
            verb = Verb.RELEASE
        else:
            verb = Verb.REJECT if self._broker.capabilities.reject else Verb.ACK
        await self._settle(verb, message, reason="nack")

    async def send_to_dlq(self, message: RawMessage, reason: str) -> None:
        """Publish to the dead-letter queue, then acknowledge. A kill in between leaves both
        copies."""
        copy = Outgoing(
            id=new_id(), body=message.body, headers={**message.headers, "x-dlq-reason": reason}
        )
        (result,) = await self._broker.publish(f"{self._subscription.queue}-dlq", [copy])
        if result.error is not None:
            raise result.error
        await self._settle(Verb.ACK, message)

    async def close(self) -> None:
        self._source = None
        await self._broker.close()

    async def health_check(self) -> bool:
        return self._source is not None and (await self._broker.health()).ok

    async def _settle(self, verb: Verb, message: RawMessage, *, reason: str = "") -> None:
        settlement = Settlement(delivery=message.metadata[_DELIVERY], verb=verb, reason=reason)
        if self._source is None:  # closed: the message returns to the queue
            return
        for result in await self._source.settle([settlement]):
            if result.error is not None:
                raise result.error


def _raw(delivery: Delivery) -> RawMessage:
    """Convert a delivery. Its id is that of the envelope, else the broker's identity."""
    headers, sent = delivery.headers, delivery.sent_at_us
    return RawMessage(
        message_id=headers.get("x-message-id") or delivery.identity or "",
        body=delivery.body,
        headers=dict(headers),
        timestamp=datetime.now(UTC) if sent is None else from_us(sent),
        metadata={_DELIVERY: delivery},
    )


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
