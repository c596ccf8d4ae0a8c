"""RabbitMQ passes the suite on real servers, an old and a new one. `restart` kills them."""

import asyncio
from pathlib import Path

import pytest

from ackbone.brokers.rabbitmq import RabbitBroker
from ackbone.core.broker import Broker, Subscription
from ackbone.testing import BrokerConformance
from tests.servers.rabbitmq import DEBIAN, NEWEST, RabbitServer

pytestmark = [pytest.mark.xdist_group("rabbitmq"), pytest.mark.timeout(300)]


class _Rabbit(BrokerConformance):
    quiet_s = 0.2
    delay_s = 0.4
    tolerance_s = 5.0  # a shared machine
    patience_s = 30.0
    root: Path
    server: RabbitServer

    @classmethod
    def setup_class(cls) -> None:
        cls.server = RabbitServer(cls.root)
        cls.server.start()

    @classmethod
    def teardown_class(cls) -> None:
        cls.server.remove()

    async def make_broker(self) -> RabbitBroker:
        return RabbitBroker(self.server.url)

    async def second_client(self, first: Broker) -> RabbitBroker:
        return await self.make_broker()

    async def restart(self, broker: Broker) -> None:
        await asyncio.to_thread(self.server.restart)


class TestDebian(_Rabbit):
    """3.10: no delivery limit may be set, and a returned message goes behind the others."""

    root = DEBIAN
    settle_s = 0.0

    async def prepare_queue(self, broker: Broker, queue: str) -> None:
        """Use the queue some time before the server is killed. A quorum queue that was declared
        less than a second before cannot be read any more on this version."""
        if self.settle_s:
            source = await broker.subscribe(Subscription(name=queue, queue=queue), room=1)
            await source.receive(limit=1, wait=0.0)
            await source.pause()
            await broker.close()
            await broker.open()
            await asyncio.sleep(self.settle_s)

    async def test_restart_keeps_messages(self) -> None:
        self.settle_s = 3.0
        await super().test_restart_keeps_messages()

    async def test_restart_under_load(self) -> None:
        self.settle_s = 3.0
        await super().test_restart_under_load()


class TestNewest(_Rabbit):
    """4.3: it counts returns, and would drop a message after 20 of them."""

    root = NEWEST
