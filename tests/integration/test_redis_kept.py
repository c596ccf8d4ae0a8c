"""Entries that stay in their stream after they are done: nobody takes them for work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context
from ackbone.config import Config
from tests.servers.redis import RedisServer

LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("more", "others", "left"),
    [("?delete_acked=never", False, 5), ("", True, 5), ("", False, 0)],
    ids=["kept", "another group", "deleted"],
)
async def test_until_idle_ends_though_entries_are_kept(
    home: Path, server: RedisServer, client: Any, more: str, others: bool, left: int
) -> None:
    app = App(Config(home=home, broker=server.url + more, default_queue="stream:task"))
    ran: list[int] = []

    @app.on("note", queue="notes")
    async def note(ctx: Context) -> None:
        ran.append(ctx.payload)

    if others:
        client.xgroup_create("notes", "readers", id="0", mkstream=True)
    async with app:
        for n in range(3):
            await app.send("note", n, queue="notes")
        async with asyncio.timeout(LIMIT_S):
            await app.work(until_idle=True)
    assert ran == [0, 1, 2]
    if others:
        (read,) = client.xreadgroup("readers", "r", {"notes": ">"}, count=10)
        client.xack("notes", "readers", *(entry for entry, _ in read[1]))
    async with app:
        await app.send("note", 3, queue="notes")
        await app.send("note", 4, queue="notes")
        if others:
            (read,) = client.xreadgroup("readers", "r", {"notes": ">"}, count=10)
            client.xack("notes", "readers", *(entry for entry, _ in read[1]))
        async with asyncio.timeout(LIMIT_S):
            await app.work(until_idle=True)
    assert ran == [0, 1, 2, 3, 4]
    assert client.xlen("notes") == left
