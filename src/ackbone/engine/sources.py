"""The brokers of a worker's subscriptions, and their readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ackbone.core.broker import (
    Broker,
    Delivery,
    Extends,
    Rereads,
    Settlement,
    Source,
    Subscription,
    Verb,
)
from ackbone.core.errors import BrokerError

from .outages import Outages, broker_side


class Sources:
    """One source for each subscription on a broker with a life of its own."""

    def __init__(
        self,
        broker_of: Callable[[str], Broker | None],
        room_of: Callable[[str], int],
        outages: Outages,
    ) -> None:
        """`broker_of` returns the broker of a queue, `room_of` how many messages of a subscription
        this worker runs at a time."""
        self._broker_of = broker_of
        self._room_of = room_of
        self._outages = outages
        self._opened: dict[str, Source] = {}

    def broker(self, sub: Subscription) -> Broker | None:
        """Return the broker of the subscription. None: its queue is in the store's file."""
        return self._broker_of(sub.queue)

    async def of(self, sub: Subscription) -> Source:
        """Return the reader of the subscription. The first call subscribes."""
        source = self._opened.get(sub.name)
        if source is None:
            broker = self.broker(sub)
            assert broker is not None  # noqa: S101 - only a queue elsewhere has a source
            source = await broker.subscribe(sub, room=self._room_of(sub.name))
            self._opened[sub.name] = source
        return source

    @property
    def opened(self) -> Mapping[str, Source]:
        """The readers that were used so far, by the name of their subscription."""
        return self._opened

    async def pause(self, sub: Subscription) -> None:
        """Return to the broker what was read for this subscription and not received."""
        if sub.name in self._opened:
            try:
                await self._opened[sub.name].pause()
            except BrokerError as error:
                side = broker_side(sub.broker)
                self._outages.failed(f"pausing {sub.queue}", error, asks_again=False, broker=side)

    async def extend(self, sub: Subscription, batch: Sequence[Delivery]) -> None:
        """Start the leases of these copies over, if the broker has leases."""
        source: object = self._opened.get(sub.name)
        if isinstance(source, Extends):
            try:
                await source.extend(batch)
            except BrokerError as error:
                caller, side = f"extending leases of {sub.queue}", broker_side(sub.broker)
                self._outages.failed(caller, error, asks_again=False, broker=side)

    def verb_of_failure(self, sub: Subscription) -> Verb:
        """Return how a copy of a message that ended without success is settled: as the policy says,
        if the broker can do that."""
        broker = self.broker(sub)
        if broker is not None and sub.ack_policy == "nack" and broker.capabilities.reject:
            return Verb.REJECT
        if broker is not None and sub.ack_policy == "requeue" and broker.capabilities.release:
            return Verb.RELEASE
        return Verb.ACK

    async def settle(self, sub: Subscription, batch: Sequence[Settlement]) -> None:
        """Settle copies. A broker that cannot release reads the part of such a copy again, or
        delivers the copy again when its lease ends."""
        broker, source = self.broker(sub), await self.of(sub)
        if broker is not None and not broker.capabilities.release:
            back = [each.delivery.part for each in batch if each.verb is Verb.RELEASE]
            if back and isinstance(source, Rereads):
                source.reread({part for part in back if part is not None})
            batch = [each for each in batch if each.verb is not Verb.RELEASE]
        if batch:
            await source.settle(batch)
