"""Two workers on a queue of its own: an ordered one has one fetcher, and nothing is left lying."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from ackbone.app import App
from ackbone.config import Config, Queue, Worker
from ackbone.engine.context import Context
from tests.servers.redis import RedisServer

CONVERSATIONS, MESSAGES = 5, 12


async def test_two_workers_keep_the_order_of_a_foreign_queue(home: Path) -> None:
    await two_workers(home, f"sqlite:///{home}/queue.db")


@pytest.mark.parametrize("log", ["yes", "no"])
async def test_two_workers_on_redis_are_one_consumer(home: Path, log: str) -> None:
    """Also where nothing is durable: the server is still everybody's, not this process's own."""
    server = RedisServer("--appendonly", log)
    server.start()
    try:
        await two_workers(home, server.url, lambda: readers(server.url))
    finally:
        server.remove()


def readers(url: str) -> None:
    """A consumer exists once it has read: the second worker must not have."""
    with Redis.from_url(url) as client:
        found: Any = client.xinfo_consumers("stream:task", "cg:workers")
    names = {each["name"] for each in found} - {b"_released"}
    assert len(names) == 1, names


async def two_workers(home: Path, broker: str, look: Callable[[], None] | None = None) -> None:
    config = Config(
        home=home,
        broker=broker,
        default_queue="stream:task",
        store=f"sqlite:///{home}/ackbone.db",
        queues={"stream:task": Queue(ordered=True)},
        worker=Worker(slots=3, lease_s=5.0, shutdown_timeout_s=5.0),
    )
    ran: dict[str, list[int]] = defaultdict(list)
    done = asyncio.Event()

    async def handler(ctx: Context) -> None:
        await asyncio.sleep(0.002)
        ran[ctx.message.ordering_key or ""].append(ctx.payload["n"])
        if sum(map(len, ran.values())) == CONVERSATIONS * MESSAGES:
            done.set()

    apps = [App(config, name=f"app{n}") for n in range(2)]
    for app in apps:
        app.on("job")(handler)
        await app.open()
    workers = [app.worker() for app in apps]
    for worker in workers:
        await worker.begin()
    try:
        for n in range(MESSAGES):
            for chat in range(CONVERSATIONS):
                await apps[0].send("job", {"n": n}, ordering_key=f"chat-{chat}")
        async with asyncio.timeout(60):
            await done.wait()
        if look is not None:
            look()
    finally:
        for worker, app in zip(workers, apps, strict=True):
            await worker.drain()
            await app.close()
    assert all(order == list(range(MESSAGES)) for order in ran.values()), dict(ran)
