"""The skeleton of docs/guides/adding-a-broker.md: the guide shows all below."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from ackbone.core import broker as port
from ackbone.core.clock import Clock
from ackbone.core.errors import BrokerUnavailable, PublishUnknown

driver: Any = None  # yours: import mydriver as driver


class SkeletonBroker:
    capabilities = port.Capabilities(durability=port.Durability.FSYNC)

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self.url, self.timeout_s = url, timeout_s  # messages show neither user nor password
        self.where = url.partition("://")[0] + "://" + url.rpartition("@")[2]
        self.link: Any = None
        self.sources: dict[str, SkeletonSource] = {}

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> "SkeletonBroker":
        return cls(url)  # raise ConfigError if the URL is wrong; connect in open()

    async def ask(self, answer: Awaitable[Any], *, wait: float = 0.0) -> Any:
        try:  # the deadline of every call, and the only place that knows the driver's errors
            async with asyncio.timeout(self.timeout_s + wait):
                return await answer
        except OSError as error:  # and driver.Error; a refused login is BrokerDenied
            raise BrokerUnavailable(f"{self.where}: {error!r}") from error

    def connected(self) -> Any:
        if self.link is None:
            raise BrokerUnavailable(f"{self.where}: the broker is not open")
        return self.link

    async def open(self) -> None:
        self.link = self.link or await self.ask(driver.connect(self.url))

    async def close(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            await self.ask(link.close())

    async def publish(self, queue: str, batch: Sequence[port.Outgoing]) -> Sequence[port.Result]:
        sent = [(each.id, each.body, dict(each.headers)) for each in batch]
        sending = self.connected().send(queue, sent)  # one request for the batch
        try:
            await self.ask(sending)  # returns when the messages are as durable as claimed
        except BrokerUnavailable as error:  # it was sent, so it may have been stored
            raise PublishUnknown([each.id for each in batch], str(error)) from error
        return [port.Result(id=each.id) for each in batch]  # with `error` for a refused one

    async def subscribe(self, sub: port.Subscription, *, room: int) -> "SkeletonSource":
        self.connected()
        return self.sources.setdefault(sub.name, SkeletonSource(self, sub.queue))

    async def health(self) -> port.Health:
        return port.Health(ok=self.link is not None)


class SkeletonSource:
    def __init__(self, broker: SkeletonBroker, queue: str) -> None:
        self.broker, self.queue = broker, queue

    async def receive(self, *, limit: int, wait: float) -> Sequence[port.Delivery]:
        asked = self.broker.connected().receive(self.queue, limit, wait)
        found = await self.broker.ask(asked, wait=wait)  # if cancelled, they must come again
        return [port.Delivery(body=b, headers=h, tag=tag, identity=i) for b, h, tag, i in found]

    async def settle(self, batch: Sequence[port.Settlement]) -> Sequence[port.Result]:
        link = self.broker.connected()
        for verb, tell in ((port.Verb.ACK, link.delete), (port.Verb.RELEASE, link.put_back)):
            if tags := [each.delivery.tag for each in batch if each.verb is verb]:
                await self.broker.ask(tell(tags))
        return [port.Result(id=each.delivery.identity or "") for each in batch]

    async def pause(self) -> None:
        """Return to the queue what was read ahead. This source reads nothing ahead."""
