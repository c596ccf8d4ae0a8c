"""Redis Streams pass the suite, on a real server; stale entries are taken back in both ways.

On the server of ACKBONE_TEST_REDIS_URL the checks that restart it are skipped.
"""

import asyncio

from ackbone.brokers.redis import RedisBroker
from ackbone.core.broker import Broker
from ackbone.testing import BrokerConformance
from tests.servers.redis import OutsideRedis, RedisServer, redis_server


class _Redis(BrokerConformance):
    quiet_s = 0.1
    delay_s = 0.4
    tolerance_s = 5.0  # a shared machine
    patience_s = 30.0
    scan: bool | None = None
    server: RedisServer | OutsideRedis
    queues: list[str]

    @classmethod
    def setup_class(cls) -> None:
        cls.queues = []
        cls.server = redis_server()
        cls.server.start()

    @classmethod
    def teardown_class(cls) -> None:
        cls.server.forget(*cls.queues)
        cls.server.remove()

    async def prepare_queue(self, broker: Broker, queue: str) -> None:
        self.queues.append(queue)

    async def make_broker(self) -> RedisBroker:
        return RedisBroker(self.server.url, lease_s=2.0, scan=self.scan)

    async def second_client(self, first: Broker) -> RedisBroker:
        return await self.make_broker()

    async def restart(self, broker: Broker) -> None:
        await asyncio.to_thread(self.server.restart)


class TestRedis(_Redis):
    """By XAUTOCLAIM."""


class TestRedisBefore62(_Redis):
    """By XPENDING and XCLAIM, as servers before 6.2 need it."""

    scan = True
