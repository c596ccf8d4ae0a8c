"""A broker of ackbone as a trigger's queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ackbone.core.broker import (
    Broker,
    Delivery,
    Outgoing,
    Settlement,
    Source,
    Subscription,
    Verb,
)
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
        await self._settle(Verb.ACK, message.metadata[_DELIVERY])

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        if requeue:
            verb = Verb.RELEASE
        else:
            verb = Verb.REJECT if self._broker.capabilities.reject else Verb.ACK
        await self._settle(verb, message.metadata[_DELIVERY], reason="nack")

    async def send_to_dlq(self, message: RawMessage, reason: str) -> None:
        """Publish to the dead-letter queue, then acknowledge. A kill in between leaves both
        copies."""
        delivery: Delivery = message.metadata[_DELIVERY]
        copy = Outgoing(
            id=new_id(), body=message.body, headers={**message.headers, "x-dlq-reason": reason}
        )
        (result,) = await self._broker.publish(f"{self._subscription.queue}-dlq", [copy])
        if result.error is not None:
            raise result.error
        await self._settle(Verb.ACK, delivery)

    async def close(self) -> None:
        self._source = None
        await self._broker.close()

    async def health_check(self) -> bool:
        return self._source is not None and (await self._broker.health()).ok

    async def _settle(self, verb: Verb, *deliveries: Delivery, reason: str = "") -> None:
        batch = [Settlement(delivery=d, verb=verb, reason=reason) for d in deliveries]
        if batch and self._source is not None:
            for result in await self._source.settle(batch):
                if result.error is not None:
                    raise result.error


def _raw(delivery: Delivery) -> RawMessage:
    """Convert a delivery. Its id is that of the envelope, else the broker's identity."""
    headers: Mapping[str, str] = delivery.headers
    sent = delivery.sent_at_us
    metadata: dict[str, Any] = {_DELIVERY: delivery}
    return RawMessage(
        message_id=headers.get("x-message-id") or delivery.identity or "",
        body=delivery.body,
        headers=dict(headers),
        timestamp=datetime.now(UTC) if sent is None else from_us(sent),
        metadata=metadata,
    )
