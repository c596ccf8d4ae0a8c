"""A queue that is held back costs nothing: its fetcher waits, whatever wakes it."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from ackbone.app import App
from ackbone.config import load_config
from ackbone.engine.context import Context


async def test_a_paused_queue_that_is_woken_leaves_the_loop_to_others(home: Path) -> None:
    """A fetcher that waits for an event which is already set never gives the loop back."""
    app = App(load_config(environ={}, overrides={"home": str(home)}))

    @app.on("chat")
    async def handle(ctx: Context) -> None:
        raise AssertionError("the queue is paused")

    async with app:
        with closing(sqlite3.connect(home / "ackbone.db", isolation_level=None)) as conn:
            conn.execute("INSERT INTO sources (subscription, paused_at) VALUES ('default', 1)")
        worker = app.worker()
        await worker.begin()
        woken = app.store.subscribe()
        for _ in range(20):  # each send wakes the fetcher, and must itself get its turn
            woken.clear()
            await app.send("chat")
            await woken.wait()
        app.store.unsubscribe(woken)
        await asyncio.wait_for(worker.drain(), 30)
