"""A worker never runs more than its slots, and leaves nothing behind as running."""

import asyncio
from pathlib import Path
from typing import Any

from ackbone import App, Config, Context, RetryPolicy
from ackbone.config import Breaker, Worker
from ackbone.core.store import Taken
from tests.servers.stores import sqlite_store

PATIENCE_S = 60.0


async def test_retries_and_new_messages_share_the_slots(home: Path) -> None:
    config = Config(
        home=home, broker="memory://", worker=Worker(slots=2), breaker=Breaker(failures=1000)
    )
    app = App(config)
    done: set[str] = set()
    all_done = asyncio.Event()
    running = most = 0

    @app.on("*", retry=RetryPolicy(max_retries=2, base_delay=0.0, jitter=0.0))
    async def handle(ctx: Context) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        if ctx.attempt == 1:
            raise RuntimeError("the first attempt fails")
        done.add(ctx.message.id)
        if len(done) == 60:
            all_done.set()

    async with app:
        worker = app.worker()
        await worker.begin()
        try:
            for n in range(60):
                await app.send("t", n)
            await asyncio.wait_for(all_done.wait(), PATIENCE_S)
        finally:
            await worker.drain()
    assert most == 2


async def test_a_claim_that_was_under_way_when_the_worker_left_is_handed_back(home: Path) -> None:
    app = App(Config(home=home))
    ran = asyncio.Event()

    @app.on("*")
    async def handle(ctx: Context) -> None:
        ran.set()

    async with app:
        claimed = asyncio.Event()
        take = sqlite_store(app).take

        async def take_and_stop(*args: Any, **options: Any) -> Taken:
            """The claim is committed, and its fetcher never hears of it."""
            taken = await take(*args, **options)
            if taken.verdicts:
                claimed.set()
                await asyncio.Event().wait()
            return taken

        sqlite_store(app).take = take_and_stop  # type: ignore[method-assign]
        receipt = await app.send("t", 1)
        first = app.worker()
        await first.begin()
        await asyncio.wait_for(claimed.wait(), PATIENCE_S)
        await first.drain()
        assert not ran.is_set()
        sqlite_store(app).take = take  # type: ignore[method-assign]

        second = app.worker()
        await second.begin()
        try:
            await asyncio.wait_for(ran.wait(), PATIENCE_S)
        finally:
            await second.drain()
        rows = await sqlite_store(app).file.read(
            lambda conn: conn.execute(
                "SELECT message_id, status, attempt, crashes FROM queue_executions"
            ).fetchall()
        )
    assert rows == [(receipt.id, "succeeded", 1, 0)]
