"""What the tests of RabbitMQ's adapter share: an open broker, another program, and its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiormq

from ackbone.brokers.rabbitmq import RabbitBroker
from ackbone.brokers.rabbitmq.source import RabbitSource
from ackbone.core.broker import Delivery, Outgoing, Settlement, Subscription, Verb
from ackbone.core.errors import BrokerUnavailable
from ackbone.core.ids import new_id
from tests.servers.rabbitmq import RabbitServer

LIMIT_S = 60


@asynccontextmanager
async def opened(url: str, *, url_now: str | None = None) -> AsyncIterator[RabbitBroker]:
    """An open broker. After it, no task of the driver or of ours may be left. `url_now`: the URL
    when it asks for the current one."""
    before = asyncio.all_tasks()
    broker = RabbitBroker(url)
    if url_now is not None:
        broker.renew_by(lambda: url_now)
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()
        async with asyncio.timeout(5):
            while left := asyncio.all_tasks() - before:
                await asyncio.wait(left, timeout=0.1)


@asynccontextmanager
async def raw(server: RabbitServer) -> AsyncIterator[Any]:
    """A channel of another program."""
    connection = await aiormq.connect(server.url)
    try:
        yield await connection.channel()
    finally:
        await connection.close()


def messages(n: int, **fields: Any) -> list[Outgoing]:
    return [Outgoing(id=new_id(), body=b"%d" % i, **fields) for i in range(n)]


async def source_of(broker: RabbitBroker, queue: str, room: int = 100) -> RabbitSource:
    return await broker.subscribe(Subscription(name=queue, queue=queue), room=room)


async def receive(source: RabbitSource, n: int, *, within_s: float = 30.0) -> list[Delivery]:
    """Receive `n` messages, over lost connections."""
    got: list[Delivery] = []
    async with asyncio.timeout(within_s):
        while len(got) < n:
            try:
                got += await source.receive(limit=n - len(got), wait=1.0)
            except BrokerUnavailable:
                await asyncio.sleep(0.05)
    return got


async def ack(source: RabbitSource, batch: list[Delivery]) -> None:
    await source.settle([Settlement(delivery=each, verb=Verb.ACK) for each in batch])


def publish_without_id(server: RabbitServer, queue: str, body: str, **properties: Any) -> None:
    letter = {
        "properties": properties,
        "routing_key": queue,
        "payload": body,
        "payload_encoding": "string",
    }
    assert server.api("POST", "exchanges/%2F/amq.default/publish", letter) == {"routed": True}


async def until(look: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until `look` returns something."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if found := await look():
                return found
            await asyncio.sleep(0.02)
