"""A network that is slow, but not silent: what is large takes longer, and comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ackbone.brokers.redis import RedisBroker
from ackbone.core.broker import Outgoing, Settlement, Subscription, Verb
from ackbone.core.errors import BrokerUnavailable
from ackbone.core.ids import new_id
from tests import sources
from tests.servers.redis import RedisServer

SUB = Subscription(name="jobs", queue="jobs")
TIMEOUT_S = 2.0
CHUNK, PAUSE_S = 32_768, 0.02
"""At most 1.6 megabytes a second."""
LIMIT_S = 60.0


class SlowLine:
    """Stands between a client and the server."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.is_cut = False
        """Nothing comes through any more."""
        self.under_way = asyncio.Event()
        """Something large is being carried."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        line = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK)
        port = line.sockets[0].getsockname()[1]
        async with line:
            yield f"redis://127.0.0.1:{port}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, to_server = await asyncio.open_unix_connection(self._path, limit=CHUNK)
        ways = [self._carry(reader, to_server), self._carry(answers, writer)]
        _, left = await asyncio.wait(
            [asyncio.create_task(way) for way in ways], return_when=asyncio.FIRST_COMPLETED
        )
        for way in left:
            way.cancel()
        to_server.close()
        writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while some := await reader.read(CHUNK):
                if self.is_cut:
                    continue
                writer.write(some)
                await writer.drain()
                if len(some) > CHUNK // 2:
                    self.under_way.set()
                    await asyncio.sleep(PAUSE_S)


async def test_what_takes_longer_than_the_timeout_comes(server: RedisServer, client: Any) -> None:
    many = 100
    line = SlowLine(client.connection_pool.connection_kwargs["path"])
    async with line.open() as url, asyncio.timeout(LIMIT_S):
        broker = RedisBroker(url, lease_s=30.0, timeout_s=TIMEOUT_S)
        await broker.open()
        sent = [Outgoing(id=new_id(), body=b"x" * 80_000) for _ in range(many)]
        assert all(each.ok for each in await broker.publish("jobs", sent))
        assert client.xlen("jobs") == many
        came: list[Any] = []
        while len(came) < many:
            came += await sources.receive(broker, SUB, limit=many, wait=1.0)
        assert len(came) == many
        await sources.settle(
            broker, SUB, [Settlement(delivery=each, verb=Verb.ACK) for each in came]
        )
        assert client.xlen("jobs") == 0
        await broker.close()


async def test_a_line_that_falls_silent_is_given_up(server: RedisServer, client: Any) -> None:
    client.xadd("jobs", {"ab": 1, "id": "large", "body": b"x" * 8_000_000})
    line = SlowLine(client.connection_pool.connection_kwargs["path"])
    async with line.open() as url, asyncio.timeout(LIMIT_S):
        broker = RedisBroker(url, timeout_s=TIMEOUT_S)
        await broker.open()
        receiving = asyncio.create_task(sources.receive(broker, SUB, limit=1, wait=LIMIT_S))
        await line.under_way.wait()
        line.is_cut = True
        with pytest.raises(BrokerUnavailable, match="no answer within"):
            await receiving
        await broker.wire.close()
