"""The broker in a PostgreSQL database passes the suite, on a real server.

On the server of ACKBONE_TEST_POSTGRES_URL the checks that restart it are skipped.
"""

import asyncio
from collections.abc import Sequence
from unittest import SkipTest

import psycopg

from ackbone.brokers.postgres import PostgresBroker
from ackbone.core.broker import Broker
from ackbone.store.postgres import migrate
from ackbone.testing import BrokerConformance
from tests.servers.postgres import OutsidePostgres, PostgresServer, postgres_server


class TestPostgres(BrokerConformance):
    quiet_s = 0.1
    delay_s = 0.4
    tolerance_s = 5.0  # a shared machine
    patience_s = 30.0
    server: PostgresServer | OutsidePostgres
    url: str

    @classmethod
    def setup_class(cls) -> None:
        cls.server = postgres_server()
        cls.server.start()
        cls.url = cls.server.url(cls.server.new_database())
        migrate.ensure_schema(cls.url)

    @classmethod
    def teardown_class(cls) -> None:
        cls.server.remove()

    async def make_broker(self) -> PostgresBroker:
        return PostgresBroker(self.url, lease_s=2.0)

    async def second_client(self, first: Broker) -> PostgresBroker:
        return await self.make_broker()

    async def restart(self, broker: Broker) -> None:
        if isinstance(self.server, OutsidePostgres):
            raise SkipTest("the server is somebody else's")
        await asyncio.to_thread(self.server.restart)

    async def dead_letters(self, broker: Broker, queue: str) -> Sequence[bytes]:
        async with await psycopg.AsyncConnection.connect(self.url) as conn:
            found = await conn.execute(
                "SELECT body FROM dead_letters WHERE queue_name = %s", (queue,)
            )
            return [body for (body,) in await found.fetchall()]
