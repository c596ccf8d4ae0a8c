"""An App on Redis and PostgreSQL: messages run, replies and follow-ups leave, commands work."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ackbone import App, Context
from ackbone.backends import PostgresStorage
from ackbone.composition.background import relays_of
from ackbone.config import Config, Queue, Retry, Worker
from ackbone.core.message import Message
from ackbone.engine.worker import EngineWorker
from ackbone.store.postgres.store import PostgresStore
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.xdist_group("postgres")


@pytest.fixture
def config(home: Path, server: RedisServer, client: Any, postgres_url: str) -> Config:
    return Config(
        home=home,
        broker=server.url,
        default_queue="stream:task",
        store=postgres_url,
        worker=Worker(lease_s=2.0),
        retry=Retry(base_delay_s=0.01, max_delay_s=0.02),
        queues={"work": Queue(), "later": Queue(), "plain": Queue(ordered=False)},
    )


def rows(url: str, statement: str, *values: Any) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as conn:
        return conn.execute(statement, values).fetchall()


async def until_idle(app: App) -> EngineWorker:
    """Everything that was sent has ended; the worker has left in order."""
    worker = app.worker(relays=relays_of(app, spawn_solo=False))
    await worker.begin()
    async with asyncio.timeout(60):
        await app.idle(worker)
    await worker.drain()
    assert worker.failure is None
    return worker


async def test_messages_run_once_with_their_effects(config: Config) -> None:
    app = App(config)
    seen: list[int] = []

    @app.on("n", queue="work")
    async def work(ctx: Context) -> dict[str, int]:
        seen.append(ctx.payload["n"])
        await ctx.reply(f"{ctx.payload['n']} is done", channel="terminal", recipient="me")
        await ctx.send("follow", {"n": ctx.payload["n"]}, queue="later")
        return {"n": ctx.payload["n"]}

    followed: list[int] = []

    @app.on("follow", queue="later")
    async def follow(ctx: Context) -> None:
        followed.append(ctx.payload["n"])

    async with app:
        assert isinstance(app.store, PostgresStore)
        batch = [Message(id=f"m{n}", type="n", payload={"n": n}) for n in range(300)]
        await app.send_many(batch, queue="work")
        await app.send_many(batch[:50], queue="work")  # copies
        worker = await until_idle(app)
    assert sorted(seen) == list(range(300))
    assert sorted(followed) == list(range(300))
    assert worker.finished == 600
    assert rows(config.store, "SELECT status, count(*) FROM queue_executions GROUP BY 1") == [
        ("succeeded", 600)
    ]
    assert rows(config.store, "SELECT count(*) FROM outbox") == [(0,)]
    assert rows(config.store, "SELECT count(*) FROM deliveries WHERE status = 'pending'") == [
        (300,)
    ]


async def test_retries_keys_lanes_and_dead_letters(config: Config) -> None:
    app = App(config)
    tried: dict[str, int] = {}
    order: dict[str, list[int]] = {}

    @app.on("t", queue="work", retries=2)
    async def work(ctx: Context) -> str:
        key = ctx.message.id
        tried[key] = tried.get(key, 0) + 1
        if ctx.payload.get("bad"):
            raise ValueError("no")
        if ctx.payload.get("late") and tried[key] == 1:
            raise ValueError("not yet")
        if ctx.message.ordering_key is not None:
            order.setdefault(ctx.message.ordering_key, []).append(ctx.payload["n"])
        return "result"

    async with app:
        for n in range(20):
            for lane in "abc":
                await app.send("t", {"n": n, "late": n % 5 == 0}, queue="work", ordering_key=lane)
        for n in range(5):
            await app.send("t", {"n": n}, queue="work", idempotency_key="k", id=f"key{n}")
        await app.send("t", {"bad": True}, queue="work", id="bad")
        await until_idle(app)
    assert order == {lane: list(range(20)) for lane in "abc"}
    assert tried["bad"] == 3
    ends = "SELECT message_id, status FROM queue_executions WHERE message_id ~ '^(key|bad)'"
    found = dict(rows(config.store, ends))
    assert found.pop("bad") == "failed"
    assert sorted(found.values()) == ["duplicate"] * 4 + ["succeeded"]
    ((reason, body),) = rows(config.store, "SELECT reason, body FROM dead_letters")
    assert b'"bad":true' in bytes(body).replace(b" ", b"")
    assert reason


async def test_two_workers_share_the_queue_and_nothing_runs_twice(config: Config) -> None:
    counts: dict[str, int] = {}
    apps = [App(config), App(config)]
    for app in apps:

        @app.on("t", queue="plain")
        async def work(ctx: Context) -> None:
            counts[ctx.message.id] = counts.get(ctx.message.id, 0) + 1
            await asyncio.sleep(0.001)

    async with apps[0], apps[1]:
        batch = [Message(id=f"m{n}", type="t", payload=None) for n in range(1000)]
        await apps[0].send_many(batch, queue="plain")
        done = await asyncio.gather(*(until_idle(app) for app in apps))
    assert counts == {f"m{n}": 1 for n in range(1000)}
    assert sum(worker.finished for worker in done) == 1000
    assert min(worker.finished for worker in done) > 0


async def test_the_ledger_is_whole_and_signed(config: Config) -> None:
    app = App(config)

    @app.on("t", queue="plain")
    async def work(ctx: Context) -> None: ...

    async with app:
        batch = [
            Message(id=f"m{n}", type="t", payload=None, tenant_id=f"t{n % 3}") for n in range(60)
        ]
        await app.send_many(batch, queue="plain")
        await until_idle(app)
    from ackbone.store.ledger import ledger_key

    key = ledger_key(config.ledger_key_file)
    storage = PostgresStorage(config)
    report = storage.verify(key, config.ledger_anchor_file, None)
    assert report.ok, [str(each) for each in report.findings]
    assert report.anchors >= 1
    assert report.events >= 120
    with psycopg.connect(config.store) as conn:
        conn.execute("UPDATE event_log SET data = '{\"attempt\":7}' WHERE task_id = 'm5'"
                     " AND event_type = 'task.claimed'")  # fmt: skip
        conn.execute("DELETE FROM event_log WHERE task_id = 'm6' AND event_type = 'task.succeeded'")
    report = storage.verify(key, config.ledger_anchor_file, None)
    kinds = {each.kind for each in report.findings}
    assert {"changed", "missing"} <= kinds


@pytest.fixture
async def desk(config: Config) -> AsyncIterator[Any]:
    app = App(config)

    @app.on("t", queue="plain", retries=0)
    async def work(ctx: Context) -> None:
        if ctx.payload == "bad":
            raise ValueError("broken")

    async with app:
        yield app


def command(config: Config, home: Path, *arguments: str, code: int = 0) -> list[Any]:
    """A command in a process of its own, as an operator runs it; its JSON lines."""
    file = home / "ackbone.yaml"
    if not file.exists():
        queues = "queues:\n  plain: {ordered: false}\n"
        file.write_text(f"broker: {config.broker}\nstore: {config.store}\n{queues}")
    done = subprocess.run(
        [sys.executable, "-m", "ackbone", *arguments, "--json", "--config", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ACKBONE_HOME": str(home)},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


async def test_commands(desk: App, config: Config, home: Path) -> None:
    await desk.send("t", "good", queue="plain", id="good")
    await desk.send("t", "bad", queue="plain", id="bad")
    await desk.send("unknown", 1, queue="plain", id="odd")
    await until_idle(desk)

    def run(*arguments: str, code: int = 0) -> list[Any]:
        return command(config, home, *arguments, code=code)

    assert run("migrate", "--check")
    found = await asyncio.to_thread(run, "dlq", "list")
    assert [each["message_id"] for each in found] == ["bad"]
    (shown,) = await asyncio.to_thread(run, "dlq", "show", "bad")
    assert shown["error"].startswith("ValueError")
    assert [each["message_id"] for each in await asyncio.to_thread(run, "parked", "list")] == [
        "odd"
    ]
    assert await asyncio.to_thread(run, "trace", "good")
    assert await asyncio.to_thread(run, "stats")
    assert any(q.get("queue") == "plain" for q in await asyncio.to_thread(run, "queues", "list"))
    assert len(await asyncio.to_thread(run, "tail", "--no-follow")) >= 5
    await asyncio.to_thread(run, "queues", "pause", "plain")
    assert await desk.store.paused() == {"plain"}
    await asyncio.to_thread(run, "queues", "resume", "plain")
    await asyncio.to_thread(run, "dlq", "discard", "bad", "--yes")
    assert await asyncio.to_thread(run, "dlq", "list") == []
    await asyncio.to_thread(run, "ledger", "verify")
    unsafe = rows(config.store, "SHOW fsync") == [("off",)]  # as on the tests' own server
    checks = await asyncio.to_thread(run, "doctor", code=10 if unsafe else 0)
    refused = [each["name"] for each in checks if each["finding"] == "refused"]
    assert refused == ["fsync"] * unsafe
