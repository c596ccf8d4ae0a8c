"""An app on Redis Streams: what plain clients write runs, once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context
from ackbone.config import Config, Queue, Tasks
from tests.servers.redis import RedisServer

STREAM = "stream:task"
GOOD = {"task_id": "t-1", "tool_name": "search", "payload": '{"q": 1}', "idempotency_key": "k-1"}
LIMIT_S = 60.0


def make_app(home: Path, server: RedisServer, *, visibility_s: float = 30.0) -> App:
    return App(
        Config(
            home=home,
            broker=f"{server.url}?visibility_timeout_s={visibility_s}",
            default_queue="stream:task",
            queues={STREAM: Queue(codec="task")},
            tasks=Tasks(max_retries=2, retry_delays_s=(0.01,)),
        )
    )


async def until_idle(app: App) -> None:
    async with asyncio.timeout(LIMIT_S):
        await app.work(until_idle=True)


def asked(home: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        return conn.execute(sql).fetchall()


def is_clean(client: Any) -> bool:
    """Nothing waits, and nothing is pending."""
    groups = client.xinfo_groups(STREAM)
    return client.xlen(STREAM) == 0 and [group["pending"] for group in groups] == [0]


async def test_a_task_that_a_plain_client_wrote_runs_once(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)
    seen: list[Any] = []

    @app.on("search", queue=STREAM)
    async def search(ctx: Context) -> dict[str, Any]:
        seen.append((ctx.message.id, ctx.payload, ctx.idempotency_key))
        return {"found": 1}

    client.xadd(STREAM, GOOD)
    client.xadd(STREAM, {**GOOD, "task_id": "t-2"})  # another task with the same key
    await until_idle(app)
    assert seen == [("t-1", {"q": 1}, "k-1")]
    assert asked(home, "SELECT message_id, status FROM queue_executions ORDER BY 1") == [
        ("t-1", "succeeded"),
        ("t-2", "duplicate"),
    ]
    assert is_clean(client)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"payload": "[1]"}, "payload is not a JSON object"),
        ({"payload": b"\xff"}, "field 'payload' is not text"),
        ({"idempotency_key": ""}, "missing required fields: idempotency_key"),
        ({"retry_count": "-3"}, "retry_count is not a number of retries"),
    ],
)
async def test_a_wrong_task_is_a_dead_letter_and_others_go_on(
    home: Path, server: RedisServer, client: Any, wrong: dict[str, Any], words: str
):
    app = make_app(home, server)
    seen: list[str] = []

    @app.on("search", queue=STREAM)
    async def search(ctx: Context) -> None:
        seen.append(ctx.message.id)

    client.xadd(STREAM, {**GOOD, **wrong})
    client.xadd(STREAM, {**GOOD, "task_id": "t-2", "idempotency_key": "k-2"})
    await until_idle(app)
    assert seen == ["t-2"]
    ((reason, error),) = asked(home, "SELECT reason, error FROM dead_letters")
    assert words in error, reason
    assert is_clean(client)


@pytest.mark.parametrize("form", [{"page": "/same"}, {"ab": "1", "body": '{"page": "/same"}'}])
async def test_entries_of_two_priorities_in_one_millisecond_are_two_messages(
    home: Path, server: RedisServer, client: Any, form: dict[str, str]
):
    """They bring no id of their own, and Redis gave both streams the same entry id."""
    app = App(Config(home=home, broker=server.url, queues={"clicks": Queue(codec="json")}))
    seen: list[int] = []

    @app.on("queue_message", queue="clicks")
    async def click(ctx: Context) -> None:
        seen.append(ctx.message.priority)

    for stream in ("clicks", "{clicks}:p3", "{clicks}:p0"):
        for entry in ("5-1", "5-2"):
            client.xadd(stream, form, id=entry)
    await until_idle(app)
    assert sorted(seen) == [0, 0, 1, 1, 3, 3]
    assert asked(home, "SELECT count(*) FROM dead_letters") == [(0,)]


async def test_a_failed_task_is_tried_again_from_the_store(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)
    tries: list[int] = []

    @app.on("search", queue=STREAM)
    async def search(ctx: Context) -> None:
        tries.append(ctx.attempt)
        raise RuntimeError("not today")

    client.xadd(STREAM, GOOD)
    await until_idle(app)
    assert tries == [1, 2, 3]
    assert asked(home, "SELECT status FROM queue_executions") == [("failed",)]
    assert is_clean(client)


async def test_a_run_that_is_longer_than_the_visibility_timeout_stays_ours(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server, visibility_s=2.0)
    runs: list[int] = []
    renewed = asyncio.Event()

    @app.on("search", queue=STREAM)
    async def search(ctx: Context) -> None:
        runs.append(ctx.attempt)
        young = 0
        while young < 10:  # looked at over several timeouts, it was never old enough to be taken
            await asyncio.sleep(0.5)
            (pending,) = client.xpending_range(STREAM, "cg:workers", "-", "+", 10)
            assert pending["time_since_delivered"] < 2000
            assert pending["times_delivered"] == 1
            young += 1
        renewed.set()

    client.xadd(STREAM, GOOD)
    await until_idle(app)
    assert runs == [1]
    assert renewed.is_set()
    assert is_clean(client)


async def test_a_message_that_is_not_due_waits_in_the_store(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)
    order: list[str] = []

    @app.on("note", queue="notes")
    async def note(ctx: Context) -> None:
        order.append(ctx.payload)

    async with app:
        receipt = await app.send("note", "later", queue="notes", delay_s=0.5)
        await app.send("note", "now", queue="notes")
    assert receipt.durability == "fsync"
    assert client.xlen("notes") == 1
    await until_idle(app)
    assert order == ["now", "later"]


async def test_ordered_messages_keep_their_order_with_two_workers(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)
    seen: dict[str, list[int]] = {}

    @app.on("say", queue="chat")
    async def say(ctx: Context) -> None:
        await asyncio.sleep(0)
        seen.setdefault(ctx.message.ordering_key or "", []).append(ctx.payload)

    async with app:
        for n in range(40):
            await app.send("say", n, queue="chat", ordering_key=f"chat-{n % 4}")
        workers = [app.worker(), app.worker()]
        try:
            for worker in workers:
                await worker.begin()
            async with asyncio.timeout(LIMIT_S):
                for worker in workers:
                    await app.idle(worker)
        finally:
            for worker in workers:
                await worker.drain()
    assert seen == {f"chat-{k}": list(range(k, 40, 4)) for k in range(4)}


async def test_a_message_that_reached_the_broker_between_two_looks_is_not_overlooked(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    app = make_app(home, server)
    ran: list[str] = []

    @app.on("note", queue="notes")
    async def note(ctx: Context) -> None:
        ran.append(ctx.payload)

    async with app:
        worker = app.worker()
        worker.pause()
        await worker.begin()
        looked = app.store.is_empty
        sent: list[str] = []

        async def send_meanwhile(names: Any) -> bool:
            """The broker was found empty, and is so no more when the store is looked at."""
            if not sent:
                sent.append((await app.send("note", "late", queue="notes")).id)
                worker.resume()
            return await looked(names)

        monkeypatch.setattr(app.store, "is_empty", send_meanwhile)
        async with asyncio.timeout(LIMIT_S):
            await app.idle(worker)
        assert ran == ["late"]
        await worker.drain()
