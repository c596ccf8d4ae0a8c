"""The task protocol beside a plain Redis client: results and dead letters, one each."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context
from ackbone.config import Config, Queue, Tasks
from ackbone.core.errors import ConfigError, TemporaryError
from ackbone.core.events import Event
from ackbone.core.outcome import Rejected
from ackbone.core.records import Identity
from ackbone.store.operations import StoreOperations
from tests import sources
from tests.servers.redis import RedisServer
from tests.servers.stores import sqlite_store

LIMIT_S = 60.0
RESULT_FIELDS = [
    "task_id",
    "status",
    "result",
    "error",
    "retry_count",
    "idempotency_key",
    "finished_at",
    "consumer",
]
LETTER_FIELDS = ["task_id", "tool_name", "payload", "error", "retry_count", "failed_at"]


def task(task_id: str, *, key: str = "", tool: str = "search", **more: str) -> dict[str, str]:
    return {
        "task_id": task_id,
        "tool_name": tool,
        "payload": '{"q": 1}',
        "idempotency_key": key or f"key-{task_id}",
        "retry_count": "0",
        **more,
    }


def make_app(home: Path, server: RedisServer, **queue: Any) -> App:
    queues = {"stream:task": Queue(**queue)} if queue else {}
    return App(
        Config(
            home=home,
            broker=f"{server.url}?visibility_timeout_s=30",
            default_queue="stream:task",
            tasks=Tasks(max_retries=2, retry_delays_s=(0.01,)),
            queues=queues,
        )
    )


async def until_idle(app: App) -> None:
    async with asyncio.timeout(LIMIT_S):
        await app.work(until_idle=True)


def entries(client: Any, stream: str) -> list[dict[str, str]]:
    return [
        {name.decode(): value.decode() for name, value in fields.items()}
        for _, fields in client.xrange(stream)
    ]


def events_of(home: Path, task_id: str) -> list[str]:
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        found = conn.execute(
            "SELECT event_type FROM event_log WHERE task_id = ? ORDER BY rowid", (task_id,)
        ).fetchall()
    return [kind for (kind,) in found]


@pytest.fixture(params=["broker", "store"])
def held(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Who holds the message while it runs: the broker's copy, or the store (ordered)."""
    return {} if request.param == "broker" else {"ordered": True}


async def test_a_broker_url_is_all_that_a_worker_needs(
    home: Path, server: RedisServer, client: Any, held: dict[str, Any]
):
    app = make_app(home, server, **held)

    @app.on("search")
    async def search(ctx: Context) -> dict[str, Any]:
        return {"found": ctx.payload["q"]}

    client.xadd("stream:task", task("t-1", ordering_key="c-1"))
    await until_idle(app)
    (result,) = entries(client, "stream:result")
    assert list(result) == RESULT_FIELDS
    assert (result["task_id"], result["status"]) == ("t-1", "succeeded")
    assert json.loads(result["result"]) == {"found": 1}
    assert (result["error"], result["retry_count"]) == ("", "0")
    assert result["idempotency_key"] == "key-t-1"
    assert result["finished_at"].endswith("Z")
    assert "-app@" in result["consumer"], "the name that XINFO CONSUMERS shows"
    assert events_of(home, "t-1") == ["task.created", "task.claimed", "task.succeeded"]
    groups = client.xinfo_groups("stream:task")
    assert [(group["name"], group["pending"]) for group in groups] == [(b"cg:workers", 0)]
    assert entries(client, "stream:dlq") == []


async def test_a_duplicate_gets_the_first_result_without_a_run(
    home: Path, server: RedisServer, client: Any
):
    app, runs = make_app(home, server), []

    @app.on("search")
    async def search(ctx: Context) -> str:
        runs.append(ctx.message.id)
        return f"by {ctx.message.id}"

    for task_id in ("t-1", "t-2", "t-1"):
        client.xadd("stream:task", task(task_id, key="same"))
        await until_idle(app)
    assert runs == ["t-1"]
    told = [
        (result["task_id"], result["status"], result["result"], result.get("duplicate_of"))
        for result in entries(client, "stream:result")
    ]
    assert told == [
        ("t-1", "succeeded", '"by t-1"', None),
        ("t-2", "succeeded", '"by t-1"', "t-1"),
    ]


async def test_a_task_that_fails_for_good_is_told_twice_once_in_each_stream(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)

    @app.on("search")
    async def search(ctx: Context) -> None:
        raise TemporaryError("the index is away")

    client.xadd("stream:task", task("t-1"))
    await until_idle(app)
    (result,) = entries(client, "stream:result")
    assert (result["status"], result["retry_count"]) == ("failed", "3")
    assert "the index is away" in result["error"]
    (letter,) = entries(client, "stream:dlq")
    assert list(letter)[:6] == LETTER_FIELDS
    assert (letter["task_id"], letter["tool_name"]) == ("t-1", "search")
    assert json.loads(letter["payload"]) == {"q": 1}
    assert "the index is away" in letter["error"]
    assert letter["retry_count"] == "3"
    assert events_of(home, "t-1") == [
        "task.created",
        *["task.claimed", "task.retried"] * 2,
        "task.claimed",
        "task.failed",
        "task.dlq",
    ]


async def test_a_task_waits_one_five_and_fifteen_minutes_unless_told_otherwise(
    home: Path, server: RedisServer, client: Any
):
    app = App(Config(home=home, broker=server.url, default_queue="stream:task"))
    happened: asyncio.Queue[Event] = asyncio.Queue()
    app.observe(happened.put_nowait)

    @app.on("search")
    async def search(ctx: Context) -> None:
        raise TemporaryError("the index is away")

    async def next_of(*kinds: str) -> Event:
        while (event := await happened.get()).type not in kinds:
            pass
        return event

    def make_due(conn: sqlite3.Connection) -> float:
        """Returns in how many seconds it would have been due."""
        ((due,),) = conn.execute("SELECT due_at FROM queue_executions WHERE status = 'ready'")
        conn.execute("UPDATE queue_executions SET due_at = 0")
        return float(due) / 1e6 - time.time()

    client.xadd("stream:task", task("t-1"))
    async with app, asyncio.timeout(LIMIT_S):
        worker = app.worker()
        await worker.begin()
        for minutes in (1, 5, 15):
            retried = await next_of("task.retried", "task.failed")
            assert retried.type == "task.retried"
            wait_s = minutes * 60
            assert wait_s <= retried.data["after_s"] <= wait_s * 1.1, "with a jitter of a tenth"
            left_s = await sqlite_store(app).file.write(make_due)
            assert wait_s - LIMIT_S < left_s <= wait_s * 1.1
            app.store.look_again()
        await next_of("task.failed")
        await worker.drain()


async def test_a_success_that_cannot_be_stored_is_told_as_the_failure_that_it_became(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)

    @app.on("search")
    async def search(ctx: Context) -> dict[str, Any]:
        if ctx.payload["q"] == 2:
            await ctx.reply("hi", channel="no text \ud800")
        return {"found": 1}

    client.xadd("stream:task", task("t-1"))
    client.xadd("stream:task", task("t-2", payload='{"q": 2}'))
    await until_idle(app)
    told = {result["task_id"]: result for result in entries(client, "stream:result")}
    assert len(client.xrange("stream:result")) == 2
    assert (told["t-1"]["status"], told["t-2"]["status"]) == ("succeeded", "failed")
    assert "surrogates not allowed" in told["t-2"]["error"]
    assert told["t-2"]["result"] == "null"
    (letter,) = entries(client, "stream:dlq")
    assert letter["task_id"] == "t-2"
    assert events_of(home, "t-2")[-2:] == ["task.failed", "task.dlq"]
    assert client.xinfo_groups("stream:task")[0]["pending"] == 0
    client.xadd("stream:task", task("t-2", payload='{"q": 2}'))  # a copy comes again
    await until_idle(app)
    assert len(client.xrange("stream:result")) == 2


async def test_failures_at_somebody_elses_count(home: Path, server: RedisServer, client: Any):
    app, attempts = make_app(home, server), []

    @app.on("search")
    async def search(ctx: Context) -> None:
        attempts.append((ctx.message.id, ctx.retry_count))
        raise TemporaryError("again")

    client.xadd("stream:task", {**task("t-1"), "retry_count": "1"})
    client.xadd("stream:task", {**task("t-2"), "retry_count": "999999999"})
    await until_idle(app)
    assert sorted(attempts) == [("t-1", 1), ("t-1", 2), ("t-2", 2)]
    told = {result["task_id"]: result["retry_count"] for result in entries(client, "stream:result")}
    assert told == {"t-1": "3", "t-2": "3"}


async def test_a_broken_task_is_told_under_the_name_that_its_sender_knows(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)
    client.xadd("stream:task", {"task_id": "t-1", "payload": "[1]", "idempotency_key": "k"})
    client.xadd("stream:task", {"nothing": "of use"})
    await until_idle(app)
    told = {result["task_id"]: result for result in entries(client, "stream:result")}
    assert told["t-1"]["status"] == "failed"
    assert "missing required fields: tool_name" in told["t-1"]["error"]
    first, second = entries(client, "stream:dlq")
    assert (first["task_id"], first["tool_name"], first["payload"]) == ("t-1", "", "[1]")
    assert "missing required fields: tool_name" in first["error"]
    assert second["task_id"].startswith("stream:task/")
    assert "missing required fields: task_id" in second["error"]


async def test_ends_without_a_word_in_the_protocol_are_failed_and_say_theirs(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server, ack_policy="ack")

    @app.on("search")
    async def search(ctx: Context) -> Any:
        return Rejected(reason="not on Sundays")

    client.xadd("stream:task", task("t-1"))
    client.xadd("stream:task", task("t-2", tool="nobody has it"))
    await until_idle(app)
    async with app, StoreOperations(sqlite_store(app), by="ada") as operations:
        parked = Identity(tenant_id="default", subscription="stream:task", message_id="t-2")
        await operations.discard_parked(parked, reason="no longer wanted")
    await until_idle(app)
    told = {result["task_id"]: result for result in entries(client, "stream:result")}
    assert {(name, result["status"], result["error"]) for name, result in told.items()} == {
        ("t-1", "failed", "rejected: not on Sundays"),
        ("t-2", "failed", "discarded: no longer wanted"),
    }


async def test_the_same_id_with_another_payload_does_not_answer_for_the_first(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)

    @app.on("search")
    async def search(ctx: Context) -> int:
        return 7

    client.xadd("stream:task", task("t-1"))
    await until_idle(app)
    client.xadd("stream:task", task("t-1", payload='{"q": 2}'))
    await until_idle(app)
    results = [r for r in entries(client, "stream:result") if r["task_id"] == "t-1"]
    assert [result["status"] for result in results] == ["succeeded"]
    (letter,) = entries(client, "stream:dlq")
    assert (letter["task_id"], letter["payload"]) == ("t-1", '{"q": 2}')


async def test_a_result_that_could_not_be_published_is_when_its_entry_comes_back(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server)
    runs, done = [], asyncio.Event()

    @app.on("search")
    async def search(ctx: Context) -> int:
        runs.append(ctx.message.id)
        done.set()
        return 7

    client.set("stream:result", "in the way")
    client.xadd("stream:task", task("t-1"))
    async with asyncio.timeout(LIMIT_S):
        async with app:
            worker = app.worker()
            await worker.begin()
            await done.wait()
            await worker.drain()
    assert client.xpending("stream:task", "cg:workers")["pending"] == 1
    client.delete("stream:result")
    await until_idle(app)
    assert runs == ["t-1"]
    assert [result["task_id"] for result in entries(client, "stream:result")] == ["t-1"]
    assert client.xpending("stream:task", "cg:workers")["pending"] == 0


async def test_what_a_stranger_lets_lie_is_taken_over(home: Path, server: RedisServer, client: Any):
    app = make_app(home, server)

    @app.on("search")
    async def search(ctx: Context) -> int:
        return 7

    client.xgroup_create("stream:task", "cg:workers", "0", mkstream=True)
    client.xadd("stream:task", task("t-1"))
    ((_, [(entry, _)]),) = client.xreadgroup("cg:workers", "stranger", {"stream:task": ">"})
    # It was silent for an hour.
    client.xclaim("stream:task", "cg:workers", "stranger", 0, [entry], idle=3_600_000)
    await until_idle(app)
    (result,) = entries(client, "stream:result")
    assert result["status"] == "succeeded"
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        ((told,),) = conn.execute(
            "SELECT data FROM event_log WHERE event_type = 'task.reclaimed'"
        ).fetchall()
    data = json.loads(told)
    assert (data["original_consumer"], data["task_id"]) == ("stranger", "t-1")
    assert data["message_id"] == entry.decode()
    assert data["new_consumer"] == result["consumer"]
    assert events_of(home, "t-1") == [
        "task.created",
        "task.reclaimed",
        "task.claimed",
        "task.succeeded",
    ]


async def test_what_a_stranger_takes_from_us_and_lets_lie_is_taken_back(
    home: Path, server: RedisServer, client: Any
):
    """The task has a row by then: our own worker had begun it, and handed it back."""
    app = make_app(home, server)
    begun = asyncio.Event()

    @app.on("search")
    async def search(ctx: Context) -> None:
        begun.set()
        await asyncio.Event().wait()

    entry = client.xadd("stream:task", task("t-1"))
    async with asyncio.timeout(LIMIT_S):
        async with app:
            worker = app.worker()
            await worker.begin()
            await begun.wait()
            await worker.drain(0.0)
    client.xclaim("stream:task", "cg:workers", "stranger", 0, [entry], idle=3_600_000)
    again = make_app(home, server)

    @again.on("search")
    async def search_again(ctx: Context) -> int:
        return 7

    await until_idle(again)
    (result,) = entries(client, "stream:result")
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        ((told,),) = conn.execute(
            "SELECT data FROM event_log WHERE event_type = 'task.reclaimed'"
        ).fetchall()
    assert json.loads(told) == {
        "original_consumer": "stranger",
        "new_consumer": result["consumer"],
        "message_id": entry.decode(),
        "task_id": "t-1",
    }


async def test_a_worker_of_another_kind_may_end_a_task(
    home: Path, server: RedisServer, client: Any
):
    """What it acknowledged and told of is none of ours; we take the next one."""
    app = make_app(home, server)

    @app.on("search")
    async def search(ctx: Context) -> int:
        return 7

    client.xgroup_create("stream:task", "cg:workers", "0", mkstream=True)
    client.xadd("stream:task", task("t-1"))
    ((_, [(entry, fields)]),) = client.xreadgroup(
        "cg:workers", "stranger", {"stream:task": ">"}, count=1
    )
    client.xadd("stream:result", {"task_id": fields[b"task_id"], "status": "succeeded"})
    client.xack("stream:task", "cg:workers", entry)
    client.xadd("stream:task", task("t-2"))
    await until_idle(app)
    told = [result["task_id"] for result in entries(client, "stream:result")]
    assert told == ["t-1", "t-2"]


async def test_two_stores_do_not_share_a_group(
    home: Path, tmp_path: Path, server: RedisServer, client: Any
):
    config = Config(home=home, broker=server.url, default_queue="stream:task")
    async with (
        App(config) as first,
        App(Config(home=tmp_path, broker=server.url, default_queue="stream:task")) as second,
    ):
        worker = first.worker()
        await worker.begin()
        with pytest.raises(ConfigError, match="share one store") as caught:
            await second.worker().begin()
        assert await first.store.identity() in str(caught.value)
        again = first.worker()  # the same store may have any number of them
        await again.begin()
        for each in (worker, again):
            await each.drain()
    unsafe = Config(
        home=tmp_path, broker=f"{server.url}?allow_unsafe=1", default_queue="stream:task"
    )
    async with App(unsafe) as third:
        allowed = third.worker()
        await allowed.begin()
        await allowed.drain()


async def test_on_one_file_results_are_messages_of_their_queue(home: Path):
    app = App(Config(home=home, queues={"default": Queue(results="done")}))
    told: list[Any] = []

    @app.on("search")
    async def search(ctx: Context) -> int:
        return 7

    async with app:
        sent = await app.send("search", {"q": 1})
        await app.work(until_idle=True)
        async with app:
            await app.broker.open()
            sub = app.config.subscription("done")
            told = list(await sources.receive(app.broker, sub, limit=10, wait=5.0))
    (only,) = told
    assert json.loads(only.body)["task_id"] == sent.id
    assert json.loads(only.body)["result"] == "7"
