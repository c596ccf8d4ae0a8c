"""Dedup keys in Redis beside the store: results that others see, and the mode without P4."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import App, Context, Message, Orchestrator
from holdfast.brokers.redis.key_memory import RedisKeyMemory
from holdfast.config import Config, Queue, Tasks, load_config
from holdfast.core.errors import (
    BrokerUnavailable,
    ConfigError,
    FinalError,
    LeaseLost,
    StoreUnavailable,
)
from holdfast.core.key_memory import KeyHolder, SharedKey
from holdfast.core.store import Run, Token
from holdfast.engine import shared_keys
from tests.integration.test_task_protocol import entries, task, until_idle
from tests.servers.redis import RedisServer

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
KEY = "idempotency:default:stream%3Atask:same"
CLAIM = "idempotency-claim:default:stream%3Atask:same"


def key(message_id: str, name: str = "k", **fields: Any) -> SharedKey:
    scope = {"tenant_id": "t", "subscription": "q", "window_s": 60.0, **fields}
    return SharedKey(key=name, message_id=message_id, **scope)


@pytest.fixture
async def memory(server: RedisServer, client: Any) -> AsyncIterator[RedisKeyMemory]:
    found = RedisKeyMemory(server.url)
    yield found
    await found.close()


def make_app(home: Path, server: RedisServer, dedup: str, **settings: Any) -> App:
    queue = Queue(dedup=dedup, **settings.pop("queue", {}))  # type: ignore[arg-type]
    tasks = Tasks(max_retries=1, retry_delays_s=(0.01,))
    broker = f"{server.url}?visibility_timeout_s=30&timeout_s=2"
    return App(
        Config(home=home, broker=broker, tasks=tasks, queues={"stream:task": queue}, **settings)
    )


def searching(app: App) -> list[str]:
    """The messages that ran."""
    runs: list[str] = []

    @app.on("search")
    async def search(ctx: Context) -> str:
        runs.append(ctx.message.id)
        return f"by {ctx.message.id}"

    return runs


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - Redis rings no bell for a plain key
            await asyncio.sleep(0.01)


def told(client: Any) -> list[tuple[str, str, str, str | None]]:
    return [
        (each["task_id"], each["status"], each["result"], each.get("duplicate_of"))
        for each in entries(client, "stream:result")
    ]


# -- the memory -----------------------------------------------------------------------------------


async def test_a_key_belongs_to_the_first_that_takes_it(memory: RedisKeyMemory):
    assert await memory.look([key("m-1")]) == [None]
    twins = [key("m-1"), key("m-2"), key("m-3", "other")]
    first, other = KeyHolder("m-1", None), KeyHolder("m-3", None)
    assert await memory.take(twins) == [first, first, other]
    assert await memory.take(twins) == [first, first, other], "again, by the same ones"
    assert await memory.look(twins) == [first, first, other]
    await memory.keep([(key("m-1"), b'{"n":1}')])
    assert await memory.take([key("m-2")]) == [KeyHolder("m-1", b'{"n":1}')]


async def test_only_its_owner_frees_a_key(memory: RedisKeyMemory, client: Any):
    await memory.take([key("m-1")])
    await memory.keep([(key("m-1"), b"1")])
    await memory.free([key("m-2")])
    assert await memory.look([key("m-2")]) == [KeyHolder("m-1", b"1")]
    await memory.free([key("m-1")])
    assert await memory.look([key("m-2")]) == [None]
    assert client.keys() == []


async def test_keys_and_results_live_for_the_window(memory: RedisKeyMemory, client: Any):
    await memory.take([key("m-1", window_s=100.0)])
    assert 90 < client.ttl("idempotency-claim:t:q:k") <= 100
    await memory.keep([(key("m-1", window_s=200.0), b"1")])
    assert 190 < client.ttl("idempotency-claim:t:q:k") <= 200
    assert 190 < client.ttl("idempotency:t:q:k") <= 200


async def test_a_result_of_somebody_who_claims_nothing_counts(memory: RedisKeyMemory, client: Any):
    client.set("idempotency:t:q:k", "1", ex=60)
    assert await memory.look([key("m-1")]) == [KeyHolder(None, b"1")]
    wanted = [key("m-1"), key("m-1", "free")]
    assert await memory.take(wanted) == [KeyHolder(None, b"1"), KeyHolder("m-1", None)]
    assert client.exists("idempotency-claim:t:q:k") == 0, "it is nobody's of ours"


async def test_a_colon_in_a_name_opens_no_door_to_another_tenant(memory: RedisKeyMemory):
    await memory.take([key("theirs", tenant_id="a", subscription="b:c")])
    for scope in ({"tenant_id": "a:b", "subscription": "c"}, {"subscription": "b", "name": "c:k"}):
        name = scope.pop("name", "k")
        taken = await memory.take([key("mine", name, **{"tenant_id": "a", **scope})])
        assert taken == [KeyHolder("mine", None)]


async def test_a_memory_that_cannot_write_says_so(memory: RedisKeyMemory, client: Any):
    client.config_set("maxmemory", 1)
    with pytest.raises(BrokerUnavailable, match="full"):
        await memory.take([key("m-1")])


async def test_the_rights_of_the_guide_are_enough(server: RedisServer, client: Any):
    guide = (ROOT / "docs/guides/redis.md").read_text()
    (rights,) = re.findall(r"`(~idempotency[^`]*)`", guide)
    client.execute_command(
        "ACL", "SETUSER", "keeper", "reset", "on", ">secret", "-@all", *rights.split()
    )
    memory = RedisKeyMemory(server.url.replace("unix://", "unix://keeper:secret@"))
    await memory.take([key("m-1")])
    await memory.keep([(key("m-1"), b"1")])
    assert await memory.look([key("m-1")]) == [KeyHolder("m-1", b"1")]
    await memory.free([key("m-1")])
    assert await memory.look([key("m-1")]) == [None]
    await memory.close()
    client.execute_command("ACL", "DELUSER", "keeper")


# -- cached ---------------------------------------------------------------------------------------


async def test_a_result_stands_in_redis_once_it_is_committed(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server, "cached")
    searching(app)
    client.xadd("stream:task", task("t-1", key="same"))
    await until_idle(app)
    assert json.loads(client.get(KEY)) == "by t-1"
    assert client.get(CLAIM) == b"t-1"
    assert 29 * 86_400 < client.ttl(KEY) <= 30 * 86_400


async def test_nothing_is_told_of_a_run_that_is_not_committed(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    app = make_app(home, server, "cached")
    runs = searching(app)
    async with app:
        worker = app.worker()
        asked = asyncio.Event()

        async def away(*_: Any, **__: Any) -> Any:
            asked.set()
            raise StoreUnavailable("away")

        finish = app.store.finish
        monkeypatch.setattr(app.store, "finish", away)
        await worker.begin()
        client.xadd("stream:task", task("t-1", key="same"))
        await asyncio.wait_for(asked.wait(), LIMIT_S)
        assert runs == ["t-1"]
        assert client.exists(KEY) == 0
        monkeypatch.setattr(app.store, "finish", finish)
        await until(lambda: client.exists(KEY))
        await worker.drain(1.0)


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
async def test_the_result_of_a_worker_that_is_not_ours_counts(
    request: pytest.FixtureRequest, home: Path, server: RedisServer, client: Any, store: str
):
    if store == "postgresql":
        store = request.getfixturevalue("postgres_url")
    app = make_app(home, server, "cached", store=store)
    runs = searching(app)
    client.set(KEY, json.dumps({"by": "a stranger"}), ex=60)
    client.set(CLAIM, "t-0", ex=60)
    client.xadd("stream:task", task("t-1", key="same"))
    client.xadd("stream:task", task("t-2", key="another"))
    await until_idle(app)
    assert runs == ["t-2"]
    assert sorted(told(client)) == [
        ("t-1", "succeeded", '{"by": "a stranger"}', "t-0"),
        ("t-2", "succeeded", '"by t-2"', None),
    ]
    async with Orchestrator(app) as tasks:
        found = await tasks.result("t-1")
        assert found is not None
        assert (found.result, found.duplicate_of) == ({"by": "a stranger"}, "t-0")


async def test_a_result_that_is_no_json_is_none(home: Path, server: RedisServer, client: Any):
    app = make_app(home, server, "cached")
    runs = searching(app)
    client.set(KEY, b"\xff not JSON", ex=60)
    client.xadd("stream:task", task("t-1", key="same"))
    await until_idle(app)
    assert runs == []
    assert told(client) == [("t-1", "succeeded", "null", "same")]


async def test_the_store_is_the_truth_whatever_the_cache_forgot(
    home: Path, server: RedisServer, client: Any
):
    app = make_app(home, server, "cached")
    runs = searching(app)
    client.xadd("stream:task", task("t-1", key="same"))
    await until_idle(app)
    client.delete(KEY, CLAIM)
    client.xadd("stream:task", task("t-2", key="same"))
    await until_idle(app)
    assert runs == ["t-1"]
    assert told(client)[1] == ("t-2", "succeeded", '"by t-1"', "t-1")


async def test_a_cache_that_is_away_holds_up_nothing(home: Path, server: RedisServer, client: Any):
    url = f"unix://{home}/nobody.sock"
    app = make_app(home, server, "cached", dedup_url=url)
    runs = searching(app)
    for task_id in ("t-1", "t-2"):
        client.xadd("stream:task", task(task_id, key="same"))
        await until_idle(app)
    assert runs == ["t-1"], "the store knows"
    assert app.metrics is not None
    missed = app.metrics.read("queue_dedup_unavailable_total", queue="stream:task")
    assert missed == 2, "asked in vain, and told in vain"


# -- redis-only -----------------------------------------------------------------------------------


async def test_redis_alone_remembers_and_the_store_keeps_no_key(
    home: Path, server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
):
    app = make_app(home, server, "redis-only")
    runs = searching(app)
    for task_id in ("t-1", "t-2", "t-1"):
        client.xadd("stream:task", task(task_id, key="same"))
        await until_idle(app)
    assert runs == ["t-1"]
    assert told(client) == [
        ("t-1", "succeeded", '"by t-1"', None),
        ("t-2", "succeeded", '"by t-1"', "t-1"),
    ]
    assert [each["idempotency_key"] for each in entries(client, "stream:result")] == ["same"] * 2
    async with app:
        rows = await app.storage.records(app.store).tasks("default", "t-2")
        assert [(row.status, row.idempotency_key) for row in rows] == [("duplicate", "same")]
    assert "P4 off" in caplog.text
    client.delete(KEY, CLAIM)
    client.xadd("stream:task", task("t-3", key="same"))
    await until_idle(app)
    assert runs == ["t-1", "t-3"], "what Redis forgets runs again: nobody else knew"


async def test_twins_wait_for_the_first_and_get_its_result(
    home: Path, server: RedisServer, client: Any
):
    app, release = make_app(home, server, "redis-only"), asyncio.Event()
    runs: list[str] = []

    @app.on("search")
    async def search(ctx: Context) -> str:
        runs.append(ctx.message.id)
        await release.wait()
        return "found"

    for n in range(4):
        client.xadd("stream:task", task(f"t-{n}", key="same"))
    waiting = asyncio.Event()
    app.observe(lambda event: waiting.set() if event.type == "task.released" else None)
    working = asyncio.create_task(until_idle(app))
    await asyncio.wait_for(waiting.wait(), LIMIT_S)
    release.set()
    await working
    assert len(told(client)) == 4
    assert len(runs) == 1
    assert {(result, of) for _, _, result, of in told(client)} == {
        ('"found"', None),
        ('"found"', runs[0]),
    }


@pytest.mark.parametrize("how", ["raises", "rejects", "times out"])
async def test_an_end_without_result_gives_the_key_back(
    home: Path, server: RedisServer, client: Any, how: str
):
    from holdfast.core.outcome import Rejected

    app = make_app(home, server, "redis-only", queue={"max_retries": 0})

    @app.on("search", timeout_s=0.05 if how == "times out" else None)
    async def search(ctx: Context) -> Any:
        if how == "raises":
            raise FinalError("no")
        if how == "times out":
            await asyncio.Event().wait()
        return Rejected(reason="no")

    client.xadd("stream:task", task("t-1", key="same"))
    await until_idle(app)
    assert [status for _, status, _, _ in told(client)] == ["failed"]
    assert client.exists(KEY, CLAIM) == 0


async def test_a_run_that_lost_its_claim_frees_no_key(home: Path, server: RedisServer, client: Any):
    """The message goes on elsewhere, under the same name."""
    app, lost = make_app(home, server, "redis-only"), asyncio.Event()

    @app.on("search")
    async def search(ctx: Context) -> None:
        asyncio.get_running_loop().call_soon(lost.set)
        raise LeaseLost("another worker has it")

    client.xadd("stream:task", task("t-1", key="same"))
    async with app:
        worker = app.worker()
        await worker.begin()
        await asyncio.wait_for(lost.wait(), LIMIT_S)
        await worker.drain(1.0)
    assert client.get(CLAIM) == b"t-1"


@pytest.mark.parametrize(("waited_s", "wait_s"), [(0, 1), (2, 1), (40, 10), (3600, 30), (-5, 1)])
def test_the_longer_it_waited_the_less_it_asks(waited_s: int, wait_s: int):
    run = Run(
        subscription="q",
        queue="q",
        message=Message(type="t", payload=None),
        token=Token(1, 1),
        attempt=1,
        crashes=0,
        claimed_at_us=10_000_000_000 + waited_s * 1_000_000,
        created_at_us=10_000_000_000,
    )
    assert shared_keys._wait_s(run) == wait_s


async def test_a_run_whose_commit_never_came_runs_again_with_its_replies(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    """A worker dies after it told Redis and before it told the store: its replies are gone."""
    runs: list[str] = []

    def replying() -> App:
        app = make_app(home, server, "redis-only")

        @app.on("search")
        async def search(ctx: Context) -> str:
            runs.append(ctx.message.id)
            await ctx.reply("found", channel="terminal", recipient="-")
            return f"run {len(runs)}"

        return app

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("away")

    async with replying() as first:
        worker = first.worker()
        monkeypatch.setattr(first.store, "finish", away)
        await worker.begin()
        client.xadd("stream:task", task("t-1", key="same"))
        await until(lambda: client.exists(KEY))
        worker._settler.stop()  # it is gone, with what it had not committed
        await worker.drain(0.0)
    second = replying()
    await until_idle(second)
    assert runs == ["t-1", "t-1"]
    assert told(client) == [("t-1", "succeeded", '"run 2"', None)]
    assert client.get(KEY) == b'"run 2"'
    async with second:
        replies = await second.storage.records(second.store).replies_of("default", "t-1")
        assert [each.content for each in replies] == ["found"]


@pytest.mark.parametrize("policy", ["stop", "continue"])
async def test_while_the_only_memory_is_away_messages_wait_or_run_and_say_so(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch, policy: str
):
    monkeypatch.setattr("holdfast.engine.shared_keys.AWAY_S", 0.05)
    memory = RedisServer()
    app = make_app(home, server, "redis-only", dedup_url=memory.url, on_dedup_unavailable=policy)
    runs = searching(app)
    seen: list[Any] = []
    app.observe(seen.append)
    client.xadd("stream:task", task("t-1", key="same"))
    async with app:
        worker = app.worker()
        await worker.begin()
        wanted = "task.released" if policy == "stop" else "task.succeeded"
        await until(lambda: any(event.type == wanted for event in seen))
        assert runs == ([] if policy == "stop" else ["t-1"])
        try:
            if policy == "stop":
                memory.start()
                await until(lambda: any(event.type == "task.succeeded" for event in seen))
            await worker.drain(1.0)
        finally:
            memory.remove()
    assert runs == ["t-1"]
    (end,) = [event for event in seen if event.type == "task.succeeded"]
    assert end.data.get("without_dedup", False) is (policy == "continue")
    assert app.metrics is not None
    assert app.metrics.read("queue_dedup_unavailable_total", queue="stream:task") > 0


# -- settings -------------------------------------------------------------------------------------


async def test_a_memory_must_be_named_somewhere(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    for url, words in (
        (None, r"queues\.q\.dedup: cached needs a Redis.*dedup_url.*REDIS_URL"),
        ("kafka://secret@host", "dedup_url: kafka: keeps no dedup keys"),
    ):
        app = App(Config(home=home, queues={"q": Queue(dedup="cached")}, dedup_url=url))
        async with app:
            with pytest.raises(ConfigError, match=words) as caught:
                app.worker()
        assert "secret" not in str(caught.value)


async def test_an_embedded_queue_may_share_its_keys_too(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("REDIS_URL", server.url)
    app = App(Config(home=home, queues={"q": Queue(dedup="cached")}))

    @app.on("*", queue="q")
    async def handle(ctx: Context) -> int:
        return 7

    async with app:
        await app.send("t", {}, queue="q", idempotency_key="same")
        worker = app.worker()
        await worker.begin()
        await asyncio.wait_for(app.idle(worker), LIMIT_S)
        await worker.drain(1.0)
    assert client.get("idempotency:default:q:same") == b"7"


def test_the_words_of_the_setting(home: Path):
    for word, wanted in (("cached", "cached"), ("redis-only", "redis-only"), (True, "store")):
        config = load_config(
            environ={}, cwd=home, overrides={"home": str(home), "queues": {"q": {"dedup": word}}}
        )
        sub = config.subscription("q")
        assert (sub.keys, sub.dedup) == (wanted, True)
    with pytest.raises(ConfigError, match=r"queues\.q\.dedup"):
        load_config(environ={}, cwd=home, overrides={"queues": {"q": {"dedup": "redis"}}})


def test_doctor_shows_what_is_off(home: Path, server: RedisServer, client: Any):
    (home / "holdfast.yaml").write_text(
        f"broker: {server.url}?allow_unsafe=1\nqueues:\n  stream:task:\n    dedup: redis-only\n"
    )
    command = [sys.executable, "-m", "holdfast", "doctor"]
    said = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False).stdout
    assert "queue stream:task: redis-only dedup does not commit with the outcome (P4 off)" in said
    assert "→ write queues.stream:task.dedup: true" in said
