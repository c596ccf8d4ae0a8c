"""Two workers on a queue of its own: an ordered one has one fetcher, and nothing is left lying."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

from holdfast.app import App
from holdfast.config import Config, Worker
from holdfast.engine.context import Context

CONVERSATIONS, MESSAGES = 5, 12


async def test_two_workers_keep_the_order_of_a_foreign_queue(home: Path) -> None:
    config = Config(
        home=home,
        broker=f"sqlite:///{home}/queue.db",
        store=f"sqlite:///{home}/holdfast.db",
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
    finally:
        for worker, app in zip(workers, apps, strict=True):
            await worker.drain()
            await app.close()
    assert all(order == list(range(MESSAGES)) for order in ran.values()), dict(ran)
