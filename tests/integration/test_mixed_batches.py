"""One batch may hold anything; what cannot be read stops nobody."""

import asyncio
from pathlib import Path

from ackbone import App, Config, Context
from ackbone.core.broker import Outgoing
from tests.servers.stores import sqlite_store


async def test_a_broken_message_between_good_ones_is_buried_and_they_run(home: Path) -> None:
    app = App(Config(home=home, broker="memory://"))
    ran: list[str] = []
    both = asyncio.Event()

    @app.on("*")
    async def handle(ctx: Context) -> None:
        ran.append(ctx.message.id)
        if len(ran) == 2:
            both.set()

    async with app:
        good = [app.outgoing("t", {"n": n}, id=f"good-{n}").outgoing for n in (1, 2)]
        broken = Outgoing(id="broken", body=b"{")
        await app.broker.publish("default", [good[0], broken, good[1]])
        worker = app.worker()
        await worker.begin()
        try:
            await asyncio.wait_for(both.wait(), 30)
        finally:
            await worker.drain()
        letters = await sqlite_store(app).file.read(
            lambda conn: conn.execute("SELECT reason, body FROM dead_letters").fetchall()
        )
    assert sorted(ran) == ["good-1", "good-2"]
    assert letters == [("undecodable", b"{")]


async def test_broken_bytes_under_the_id_of_a_good_message_are_kept(home: Path) -> None:
    app = App(Config(home=home))

    @app.on("t")
    async def handle(ctx: Context) -> None:
        return None

    async with app:
        await app.broker.publish("default", [app.outgoing("t", {"n": 1}, id="twice").outgoing])
    await app.work(until_idle=True)
    async with app:
        broken = Outgoing(id="twice", body=b"{")
        await app.broker.publish("default", [broken])
        await app.broker.publish("default", [broken])  # a further copy of the same bytes
    await app.work(until_idle=True)
    async with app:
        letters, ends = await sqlite_store(app).file.read(
            lambda conn: (
                conn.execute("SELECT reason, body FROM dead_letters").fetchall(),
                conn.execute("SELECT status, count(*) FROM queue_executions GROUP BY 1").fetchall(),
            )
        )
    assert letters == [("undecodable", b"{")]
    assert sorted(ends) == [("failed", 1), ("succeeded", 1)]
