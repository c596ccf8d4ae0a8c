"""Replies for channels that no living worker has, and queues that no living worker reads."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Config, Context
from ackbone.composition.background import relays_of
from ackbone.core.outbound.delivery import Outbound
from ackbone.delivery.recovery_report import store_report
from tests.unit.desk import until


class Mail:
    name = "mail"

    async def send(self, reply: Outbound) -> None:
        return None

    async def close(self) -> None:
        return None


def make_app(home: Path, *, mail: bool = False) -> App:
    app = App(Config(home=home))
    if mail:
        app.channel(Mail())

    @app.on("ask")
    async def ask(ctx: Context) -> None:
        await ctx.reply("an answer", channel="mail", recipient="ada")
        await ctx.reply("sooner", channel="terminal", recipient="ada", now=True)

    return app


async def command(home: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of a command, run beside the workers of this process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ackbone", *arguments, "--json",
        env={**os.environ, "ACKBONE_HOME": str(home)}, cwd=home,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    return [json.loads(line) for line in out.splitlines()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "no living worker has" in r.getMessage()]


async def test_a_reply_that_nobody_sends(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning for each channel at the commit; then in `stats` and in `doctor`."""
    caplog.set_level(logging.WARNING)
    async with make_app(home) as app:
        worker = app.worker(relays=relays_of(app, spawn_solo=False))
        await worker.begin()
        for _ in range(3):
            await app.send("ask")
        await app.send("ask", queue="unread")
        async with asyncio.timeout(30):
            await app.idle(worker)
        await until(lambda: _is_true(len(warnings(caplog)) >= 2))
        (stats,) = await command(home, "stats")
        assert stats["uncarried"] == {"mail": 3, "terminal": 3}
        assert stats["unserved"] == {"unread": 1}
        found = [c for c in await command(home, "doctor") if c["finding"] == "warning"]
        assert [check["name"] for check in found] == ["queues", "channels", "channels"], found
        assert "1 message waits in unread" in found[0]["detail"]
        assert "3 replies wait for mail" in found[1]["detail"]
        await worker.drain()
        first, second = sorted(warnings(caplog))
        assert "channel 'mail'" in first
        assert "channel 'terminal'" in second
        records = app.storage.records(app.store)
        report = await store_report(records, carried=["terminal"])
        assert "Waiting: 3 items for mail" in report
        assert "terminal," not in report
        assert report.endswith("Resuming delivery...")
        report = await store_report(records, carried=[])
        assert "Resuming" not in report, "nothing is sent then"
        (stats,) = await command(home, "stats")
        assert stats["uncarried"] == stats["unserved"] == {}, "no worker is there at all"


async def test_a_reply_that_another_worker_sends(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with make_app(home, mail=True) as postman, make_app(home) as app:
        sender = postman.worker(relays=relays_of(postman, spawn_solo=False, terminal=True))
        worker = app.worker(relays=relays_of(app, spawn_solo=False))
        await worker.begin()
        await sender.begin()
        await app.send("ask")
        records = app.storage.records(app.store)
        await until(partial(_all_sent, records))
        await worker.drain()
        await sender.drain()
    assert warnings(caplog) == []


async def _is_true(value: bool) -> bool:
    return value


async def _all_sent(records: Any) -> bool:
    counts = {each.kind: each.count for each in await records.reply_counts()}
    return counts.get("sent", 0) >= 1 and set(counts) == {"sent"}
