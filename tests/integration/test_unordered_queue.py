"""A queue that asks for no order runs messages with an ordering key, too."""

import asyncio
from pathlib import Path

import pytest

from ackbone import App, Config, Context
from ackbone.config import Queue


@pytest.mark.parametrize("broker", ["sqlite", "memory://"])
async def test_keyed_messages_run_where_no_order_is_asked_for(home: Path, broker: str) -> None:
    app = App(Config(home=home, broker=broker, queues={"default": Queue(ordered=False)}))
    together: set[int] = set()
    all_here = asyncio.Event()

    @app.on("said")
    async def said(ctx: Context) -> None:
        """Ends when all of them are running: one conversation, yet nobody waits for another."""
        together.add(ctx.payload)
        if len(together) == 6:
            all_here.set()
        await all_here.wait()

    async with app:
        for n in range(6):
            await app.send("said", n, ordering_key="ada" if n % 2 else None)
        await asyncio.wait_for(app.work(until_idle=True), 60)
    assert together == set(range(6))
