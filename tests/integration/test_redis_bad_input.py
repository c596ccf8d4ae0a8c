"""Bad input on a real Redis: a clear error or a dead letter; nothing lost; other streams go on."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from ackbone import App, Context
from ackbone.composition.background import relays_of
from ackbone.config import Config, Tasks
from ackbone.core.broker import Examinable
from ackbone.core.errors import BrokerUnavailable
from ackbone.core.findings import Finding
from ackbone.engine.worker import EngineWorker
from tests.faults.waiting import until
from tests.servers.redis import RedisServer

STREAM, GROUP, OTHER = "stream:task", "cg:workers", "notes"
LIMIT_S = 60.0


def task(name: str, **more: Any) -> dict[str, Any]:
    fields = {
        "task_id": name,
        "tool_name": "search",
        "payload": '{"q": 1}',
        "idempotency_key": f"key-{name}",
        "retry_count": "0",
        **more,
    }
    return {field: value for field, value in fields.items() if value is not None}


class Bench:
    """An app with two queues: the tasks', and one of another kind that must go on."""

    def __init__(self, home: Path, url: str, *, visibility_s: float = 30.0) -> None:
        self.home = home
        self.app = App(
            Config(
                home=home,
                broker=f"{url}?visibility_timeout_s={visibility_s}&timeout_s=5",
                default_queue=STREAM,
                tasks=Tasks(max_retries=2, retry_delays_s=(0.01,)),
            )
        )
        self.ran: list[str] = []
        self.fails: set[str] = set()
        self.app.on("search")(self._run)
        self.app.on("note", queue=OTHER)(self._run)

    async def _run(self, ctx: Context) -> dict[str, str]:
        self.ran.append(ctx.message.id)
        if ctx.message.id in self.fails:
            raise RuntimeError("not today")
        return {"by": ctx.message.id}

    @asynccontextmanager
    async def working(self) -> AsyncIterator[EngineWorker]:
        async with self.app:
            worker = self.app.worker(relays=relays_of(self.app, spawn_solo=False))
            await worker.begin()
            try:
                yield worker
                assert worker.failure is None
            finally:
                await worker.drain()

    async def until_idle(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.app.work(until_idle=True)

    def rows(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.home / "ackbone.db")) as conn:
            return conn.execute(sql).fetchall()

    def has_ended(self, *ids: str, status: str = "succeeded") -> Callable[[], bool]:
        def ended() -> bool:
            found = self.rows("SELECT message_id, status FROM queue_executions")
            return {(each, status) for each in ids} <= set(found)

        return ended


@pytest.fixture
def bench(home: Path, server: RedisServer, client: Any) -> Bench:
    return Bench(home, server.url)


# -- entries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"task_id": None}, "missing required fields: task_id"),
        ({"tool_name": None}, "missing required fields: tool_name"),
        ({"payload": None}, "missing required fields: payload"),
        ({"idempotency_key": None}, "missing required fields: idempotency_key"),
        ({"task_id": "", "payload": ""}, "missing required fields: task_id, payload"),
        ({"payload": "[1]"}, "payload is not a JSON object"),
        ({"payload": "null"}, "payload is not a JSON object"),
        ({"payload": '"text"'}, "payload is not a JSON object"),
        ({"payload": "{"}, "payload is not valid JSON"),
        ({"payload": '{"a":' * 100 + "1" + "}" * 100}, "nested deeper"),
        ({"payload": '{"n": 1e999999}'}, "payload is not valid JSON"),
        ({"payload": b"\xff\xfe"}, "field 'payload' is not text"),
        ({"retry_count": "-1"}, "retry_count is not a number of retries"),
        ({"retry_count": "three"}, "retry_count is not a number of retries"),
        ({"retry_count": "9" * 30}, "retry_count is not a number of retries"),
        ({"retry_count": "1.5"}, "retry_count is not a number of retries"),
        ({"retry_count": "\u0661"}, "retry_count is not a number of retries"),
        ({"priority": "urgent"}, "priority"),
        ({"created_at": "yesterday"}, "created_at"),
    ],
)
async def test_an_entry_that_is_no_task_is_a_dead_letter_and_the_next_one_runs(
    bench: Bench, client: Any, wrong: dict[str, Any], words: str
):
    client.xadd(STREAM, task("bad", **wrong))
    client.xadd(STREAM, task("good"))
    await bench.until_idle()
    assert bench.ran == ["good"]
    ((reason, error, state, body),) = bench.rows(
        "SELECT reason, error, state, body FROM dead_letters"
    )
    assert (reason, state) == ("undecodable", "open")
    assert words in error
    kept = json.loads(body)  # whole: a person can read, mend and send it again
    assert {name: kept[name] for name in kept if isinstance(kept[name], str)} == {
        name: value for name, value in task("bad", **wrong).items() if not isinstance(value, bytes)
    }
    ((_, told),) = client.xrange("stream:dlq")
    assert words in told[b"error"].decode()
    assert client.xlen(STREAM) == 0
    assert [group["pending"] for group in client.xinfo_groups(STREAM)] == [0]


async def test_an_entry_of_nothing_that_is_known_is_a_dead_letter(bench: Bench, client: Any):
    client.xadd(STREAM, {"hello": "world", b"\xff": b"\x00"})
    client.xadd(STREAM, {"": ""})
    client.xadd(STREAM, task("good"))
    await bench.until_idle()
    assert bench.ran == ["good"]
    reasons = bench.rows("SELECT reason FROM dead_letters")
    assert reasons == [("undecodable",), ("undecodable",)]
    assert client.xlen(STREAM) == 0


@pytest.mark.parametrize("forged", ["2", "999999999"])
async def test_a_forged_count_of_retries_is_held_to_the_limit(
    bench: Bench, client: Any, forged: str
):
    """It may take retries away, not the run; and it never stands for more than there are."""
    client.xadd(STREAM, task("good", retry_count=forged))
    client.xadd(STREAM, task("bad", retry_count=forged))
    bench.fails.add("bad")
    await bench.until_idle()
    assert sorted(bench.ran) == ["bad", "good"]
    results = {
        fields[b"task_id"]: (fields[b"status"], fields[b"retry_count"])
        for _, fields in client.xrange("stream:result")
    }
    assert results == {b"good": (b"succeeded", b"2"), b"bad": (b"failed", b"3")}


# -- streams --------------------------------------------------------------------------------------


async def test_a_key_of_another_kind_stops_its_own_queue_only_and_until_it_is_mended(
    bench: Bench, client: Any, caplog: pytest.LogCaptureFixture
):
    client.set(STREAM, "not a stream")
    async with bench.working():
        sent = [(await bench.app.send("note", {}, queue=OTHER)).id for _ in range(3)]
        await until(bench.has_ended(*sent), "the other queue goes on")
        await until(lambda: "WRONGTYPE" in caplog.text, "it is said")
        assert STREAM in caplog.text
        with pytest.raises(Exception, match="WRONGTYPE"):
            await bench.app.send("search", {})
        client.delete(STREAM)
        client.xadd(STREAM, task("late"))
        await until(bench.has_ended("late"), "the queue goes on once the key is gone")


@pytest.mark.parametrize("key", ["stream:result", "stream:dlq"])
async def test_a_wrong_key_where_ends_are_told_holds_no_task_up_and_loses_no_word(
    home: Path, server: RedisServer, client: Any, key: str
):
    """The result waits; the task has ended all the same, and the next ones run."""
    bench = Bench(home, server.url, visibility_s=2.0)
    client.set(key, "not a stream")
    bench.fails.add("bad")
    async with bench.working():
        client.xadd(STREAM, task("good"))
        client.xadd(STREAM, task("bad"))
        await until(bench.has_ended("good"), "a good one ends")
        await until(bench.has_ended("bad", status="failed"), "a bad one ends")
        client.delete(key)
        wanted = {b"good", b"bad"} if key == "stream:result" else {b"bad"}
        await until(lambda: told(client, key) == wanted, "what waited is told")
        await until(lambda: client.xlen(STREAM) == 0, "nothing is left")
        assert client.xlen(key) == len(wanted)
    assert bench.ran.count("good") == 1


def told(client: Any, key: str) -> set[bytes]:
    return {each[b"task_id"] for _, each in client.xrange(key)}


async def test_a_group_that_is_deleted_at_run_time_is_made_again_and_loses_nothing(
    bench: Bench, client: Any
):
    """What was pending is forgotten by the server; it is still in the stream, and known here."""
    gate = asyncio.Event()
    begun = asyncio.Event()

    @bench.app.on("slow")
    async def slow(ctx: Context) -> None:
        bench.ran.append(ctx.message.id)
        begun.set()
        await gate.wait()

    client.xadd(STREAM, task("held", tool_name="slow"))
    async with bench.working():
        async with asyncio.timeout(LIMIT_S):
            await begun.wait()
        assert client.xgroup_destroy(STREAM, GROUP) == 1
        for n in range(5):
            client.xadd(STREAM, task(f"new-{n}"))
        await until(bench.has_ended(*(f"new-{n}" for n in range(5))), "new ones run")
        gate.set()
        await until(bench.has_ended("held"), "the one that ran ends")
        await until(
            lambda: client.xlen(STREAM) == 0 and client.xinfo_groups(STREAM)[0]["pending"] == 0,
            "nothing is left",
        )
    assert sorted(bench.ran) == ["held", *(f"new-{n}" for n in range(5))], "each of them once"
    assert client.xlen("stream:result") == 6


# -- servers --------------------------------------------------------------------------------------


async def test_a_full_redis_refuses_what_is_new_and_loses_nothing_of_what_is_there(
    bench: Bench, client: Any, caplog: pytest.LogCaptureFixture
):
    """Results need room, too: they wait, and are told once there is some."""
    bench.fails.add("bad")
    async with bench.working():
        client.xadd(STREAM, task("first"))
        await until(bench.has_ended("first"), "it works")
        for each in ("one", "two", "bad"):
            client.xadd(STREAM, task(each))
        client.config_set("maxmemory", 1)
        with pytest.raises(BrokerUnavailable, match="Redis is full"):
            await bench.app.send("note", {}, queue=OTHER)
        await until(lambda: "Redis is full" in caplog.text, "it is said")
        client.config_set("maxmemory", 0)
        await until(bench.has_ended("one", "two"), "what is there is worked on")
        await until(bench.has_ended("bad", status="failed"), "and fails where it must")
        await until(
            lambda: told(client, "stream:result") == {b"first", b"one", b"two", b"bad"},
            "the results are told",
        )
        await until(lambda: told(client, "stream:dlq") == {b"bad"}, "and the dead letter")
        await until(lambda: client.xlen(STREAM) == 0, "nothing is left")
        sent = await bench.app.send("note", {}, queue=OTHER)
        await until(bench.has_ended(sent.id), "there is room again")
    assert client.xlen("stream:result") == 4
    assert [bench.ran.count(each) for each in ("first", "one", "two", "bad")] == [1, 1, 1, 3]


async def test_a_full_redis_is_worked_empty_though_results_find_no_room(
    home: Path, server: RedisServer, client: Any
):
    """Else it would stay full: what is done is deleted only when its result is safe somewhere."""
    bench = Bench(home, server.url, visibility_s=1.0)
    names = [f"t-{n}" for n in range(150)]  # more than one fetch
    async with bench.working():
        client.xadd(STREAM, task("first"))
        await until(bench.has_ended("first"), "it works")
    for name in names:
        client.xadd(STREAM, task(name))
    client.config_set("maxmemory", 1)
    async with bench.working():
        await until(bench.has_ended(*names), "all of them are worked on")
        await until(lambda: client.xlen(STREAM) == 0, "nothing is left")
        assert told(client, "stream:result") == {b"first"}
        client.config_set("maxmemory", 0)
        await until(lambda: client.xlen("stream:result") == 151, "the results are told")
    assert told(client, "stream:result") == {b"first", *(name.encode() for name in names)}
    assert sorted(bench.ran) == sorted(["first", *names]), "each of them once"


async def test_a_worker_that_meets_a_full_redis_begins_all_the_same(bench: Bench, client: Any):
    """Nobody has read the queue yet: its group, and whose it is, are written while it is full."""
    client.xadd(STREAM, task("waits"))
    client.config_set("maxmemory", 1)
    async with bench.working():
        await until(bench.has_ended("waits"), "it ran")
    client.config_set("maxmemory", 0)


@pytest.fixture
def free_port() -> int:
    """Of this machine; a replica finds its primary by one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def replica(free_port: int) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary, and a real replica of it that takes no writes."""
    primary = RedisServer("--port", str(free_port), "--bind", "127.0.0.1")
    copy = RedisServer("--replicaof", "127.0.0.1", str(free_port))
    primary.start()
    copy.start()
    yield primary, copy
    copy.remove()
    primary.remove()


async def test_a_replica_is_refused_and_works_once_it_is_the_primary(
    home: Path, replica: tuple[RedisServer, RedisServer]
):
    primary, copy = replica
    with Redis.from_url(primary.url) as client:
        client.xadd(STREAM, task("before"))
    with Redis.from_url(copy.url) as client:
        await until(lambda: client.exists(STREAM) == 1, "the replica has it")
        bench = Bench(home, copy.url)
        async with bench.app:
            with pytest.raises(BrokerUnavailable, match="replica and takes no writes"):
                await bench.app.send("note", {}, queue=OTHER)
            assert isinstance(bench.app.broker, Examinable)
            found = {check.name: check for check in await bench.app.broker.examine()}
            assert found["redis role"].finding is Finding.REFUSED
        with pytest.raises(BrokerUnavailable, match="name the primary"):
            async with bench.working():
                pass
        client.replicaof("no", "one")  # a failover
        async with bench.working():
            await until(bench.has_ended("before"), "it works")
            sent = await bench.app.send("note", {}, queue=OTHER)
            await until(bench.has_ended(sent.id), "and takes new ones")
        assert client.xlen("stream:result") == 1
        assert client.xlen(STREAM) == 0


async def test_a_primary_that_becomes_a_replica_is_waited_for(
    home: Path, replica: tuple[RedisServer, RedisServer], caplog: pytest.LogCaptureFixture
):
    """A failover and back, under a running worker: it is said, and nothing is lost."""
    server, copy = replica
    with Redis.from_url(server.url) as client, Redis.from_url(copy.url) as other:
        bench = Bench(home, server.url)
        async with bench.working():
            client.xadd(STREAM, task("first"))
            await until(bench.has_ended("first"), "it works")
            other.replicaof("no", "one")
            client.xadd(STREAM, task("second", tool_name="nobody's"))
            client.replicaof("127.0.0.1", 1)  # a primary that does not answer: it keeps its data
            await until(lambda: "takes no writes; name the primary" in caplog.text, "it is said")
            client.replicaof("no", "one")
            client.xadd(STREAM, task("third"))
            await until(bench.has_ended("third"), "it goes on by itself")
        assert bench.ran == ["first", "third"]
        parked = bench.rows("SELECT status FROM queue_executions WHERE message_id = 'second'")
        assert parked == [("parked",)]
