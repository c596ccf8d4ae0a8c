"""An app on RabbitMQ: what it sends and what other programs send runs once, and nothing is left."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context
from ackbone.config import Config, Queue, Tasks, Worker
from ackbone.core.ids import new_id
from tests.servers.rabbitmq import RabbitServer

pytestmark = [pytest.mark.xdist_group("rabbitmq"), pytest.mark.timeout(120)]
LIMIT_S = 60.0


def make_app(home: Path, server: RabbitServer, name: str) -> App:
    return App(
        Config(
            home=home,
            broker=server.url,
            queues={
                f"{name}-in": Queue(),
                f"{name}-out": Queue(ordered=False),
                f"{name}-plain": Queue(codec="json", ordered=False),
            },
            tasks=Tasks(max_retries=2, retry_delays_s=(0.01,)),
            worker=Worker(slots=20),
        )
    )


def rows(home: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        return conn.execute(
            "SELECT queue_name, status, count(*) FROM queue_executions GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()


async def test_messages_run_once_and_go_on(home: Path, newest_rabbitmq: RabbitServer):
    name = f"app-{new_id()[-8:]}"
    app = make_app(home, newest_rabbitmq, name)
    ran: list[tuple[str, Any]] = []
    tried: list[int] = []

    @app.on("order", queue=f"{name}-in")
    async def order(ctx: Context) -> dict[str, Any]:
        ran.append(("in", ctx.payload))
        if ctx.payload == 3 and not tried:
            tried.append(1)
            raise ConnectionError("again")
        await ctx.send("bill", ctx.payload, queue=f"{name}-out")
        return {"ok": ctx.payload}

    @app.on("bill", queue=f"{name}-out")
    async def bill(ctx: Context) -> None:
        ran.append(("out", ctx.payload))

    @app.on("queue_message", queue=f"{name}-plain")
    async def plain(ctx: Context) -> None:
        ran.append(("plain", ctx.payload))

    async with app:
        for n in range(10):
            receipt = await app.send("order", n, queue=f"{name}-in", ordering_key="k")
        assert receipt.durability == "fsync"
        await app.send("order", 99, queue=f"{name}-in", id="twin", priority=3)
        await app.send("order", 99, queue=f"{name}-in", id="twin", priority=3)
        await app.send("order", 50, queue=f"{name}-in", delay_s=0.2)
        async with asyncio.timeout(LIMIT_S):
            await app.work(until_idle=True)  # this declares the queues
        letter = {
            "properties": {},
            "routing_key": f"{name}-plain",
            "payload": '{"page": "/prices"}',
            "payload_encoding": "string",
        }
        for _ in range(2):  # two messages, though nothing tells one from the other
            newest_rabbitmq.api("POST", "exchanges/%2F/amq.default/publish", letter)
        async with asyncio.timeout(LIMIT_S):
            await app.work(until_idle=True)
    keyed = [n for where, n in ran if where == "in" and n < 10]
    assert keyed == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert sorted(n for where, n in ran if where == "out") == [*range(10), 50, 99]
    assert [n for where, n in ran if where == "plain"] == [{"page": "/prices"}] * 2
    assert rows(home) == [
        (f"{name}-in", "succeeded", 12),
        (f"{name}-out", "succeeded", 12),
        (f"{name}-plain", "succeeded", 2),
    ]
    for each in newest_rabbitmq.api("GET", "queues/%2F"):
        if each["name"].startswith(name):
            assert each.get("messages", 0) == 0
            newest_rabbitmq.forget(each["name"])
