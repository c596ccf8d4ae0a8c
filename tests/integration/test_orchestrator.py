"""The orchestrator: on Redis beside our workers and other people's, and on one file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ackbone import (
    App,
    Ask,
    Cancelled,
    Context,
    Decision,
    InvalidMessage,
    Message,
    Orchestrator,
    TemporaryError,
)
from ackbone.admin.approvals import Approvals
from ackbone.cli.session import operating
from ackbone.composition.background import relays_of
from ackbone.config import Config, Retry, Tasks
from ackbone.core.clock import from_us
from ackbone.core.errors import StoreUnavailable
from tests.servers.redis import RedisServer

LIMIT_S = 30.0
MakeApp = Callable[[str], App]


ON_POSTGRES = pytest.mark.xdist_group("postgres")


@pytest.fixture(params=["one file", "redis", pytest.param("redis, postgresql", marks=ON_POSTGRES)])
def make_app(request: pytest.FixtureRequest, home: Path) -> MakeApp:
    """Apps of several processes, as far as they know: each opens its own."""
    broker = store = "sqlite"
    if "postgresql" in request.param:
        store = request.getfixturevalue("postgres_url")
    if "redis" in request.param:
        request.getfixturevalue("client")
        server: RedisServer = request.getfixturevalue("server")
        broker = f"{server.url}?visibility_timeout_s=30"

    def make(name: str) -> App:
        tasks = Tasks(max_retries=2, retry_delays_s=(0.01,))
        retry = Retry(max_retries=2, base_delay_s=0.01)
        config = Config(home=home, broker=broker, store=store, tasks=tasks, retry=retry)
        return App(config, name=name)

    return make


@asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    async with app:
        worker = app.worker(relays=relays_of(app, spawn_solo=False))
        await worker.begin()
        try:
            yield
        finally:
            await worker.drain()


async def test_tasks_are_submitted_and_waited_for(make_app: MakeApp):
    app = make_app("worker")

    @app.on("add")
    async def add(ctx: Context) -> int:
        return int(ctx.payload["a"]) + int(ctx.payload["b"])

    @app.on("fail")
    async def fail(ctx: Context) -> None:
        raise TemporaryError("not today")

    async with Orchestrator(make_app("boss")) as tasks, asyncio.timeout(LIMIT_S):
        first = await tasks.submit("add", {"a": 1, "b": 2})
        assert await tasks.status(first.id) == "queued"
        assert await tasks.result(first.id) is None
        async with working(app):
            result = await tasks.wait(first.id)
            assert (result.ok, result.status, result.result, result.error) == (
                True,
                "succeeded",
                3,
                "",
            )
            assert result.finished_at is not None
            assert await tasks.status(first.id) == "succeeded"
            failed = await tasks.submit("fail", {})
            ended = await tasks.wait(failed.id)
            assert (ended.ok, ended.retry_count) == (False, 3)
            assert "not today" in ended.error
            many = await tasks.submit_many(
                [Message(type="add", payload={"a": n, "b": 1}) for n in range(50)]
            )
            results = await asyncio.gather(*(tasks.wait(each.id) for each in many))
            assert [each.result for each in results] == list(range(1, 51))


async def test_a_duplicate_has_the_first_result(make_app: MakeApp):
    app = make_app("worker")

    @app.on("once")
    async def once(ctx: Context) -> str:
        return ctx.message.id

    async with Orchestrator(make_app("boss")) as tasks, asyncio.timeout(LIMIT_S), working(app):
        first = await tasks.submit("once", {}, idempotency_key="k")
        assert (await tasks.wait(first.id)).result == first.id
        second = await tasks.submit("once", {}, idempotency_key="k")
        result = await tasks.wait(second.id)
        assert (result.ok, result.result, result.duplicate_of) == (True, first.id, first.id)


async def test_waiting_ends_in_time_and_says_how_it_stands(make_app: MakeApp):
    async with Orchestrator(make_app("boss")) as tasks:
        task = await tasks.submit("nobody", {})
        with pytest.raises(TimeoutError, match=f"task {task.id} is queued after 0.05 s"):
            await tasks.wait(task.id, timeout_s=0.05)
        with pytest.raises(TimeoutError, match=r"task never-was is unknown after 0\.05 s"):
            await tasks.wait("never-was", timeout_s=0.05)


async def events_of(app: App, task_id: str, tenant_id: str = "default") -> list[str]:
    async with app.storage.reading() as records:
        return [event.type for event in await records.events_of(tenant_id, task_id)]


async def test_a_task_is_created_once_when_it_is_submitted(make_app: MakeApp):
    app, boss = make_app("worker"), make_app("boss")

    @app.on("*")
    async def handle(ctx: Context) -> None:
        return None

    async with Orchestrator(boss) as tasks, asyncio.timeout(LIMIT_S):
        before = datetime.now(UTC)
        first = await tasks.submit("job", {}, tenant_id="acme")
        second, third = await tasks.submit_many([Message(type="job"), Message(type="job")])
        names = [(first.id, "acme"), (second.id, "default"), (third.id, "default")]
        for task_id, tenant_id in names:
            assert await tasks.status(task_id, tenant_id=tenant_id) == "queued"
            assert await events_of(boss, task_id, tenant_id) == ["task.created"]
        async with boss.storage.reading() as records:
            (created,) = await records.events_of("acme", first.id)
        assert created.data["tool_name"] == "job"
        assert before <= from_us(created.data["created_at"]) <= datetime.now(UTC)
        assert await tasks.status(first.id) == "unknown", "it is another tenant's"
        assert await tasks.status("never-was") == "unknown"
        async with working(app):
            for task_id, tenant_id in names:
                await tasks.wait(task_id, tenant_id=tenant_id)
    for task_id, tenant_id in names:
        kinds = await events_of(boss, task_id, tenant_id)
        assert kinds == ["task.created", "task.claimed", "task.succeeded"]


async def test_a_task_that_is_submitted_twice_is_created_once(make_app: MakeApp):
    boss = make_app("boss")
    async with Orchestrator(boss) as tasks:
        for _ in range(2):
            await tasks.submit("job", {}, id="t-1")
        await tasks.submit_many([Message(type="job", id="t-1"), Message(type="job", id="t-2")])
    assert await events_of(boss, "t-1") == await events_of(boss, "t-2") == ["task.created"]


async def test_nothing_is_written_about_a_task_that_is_refused(make_app: MakeApp):
    boss = make_app("boss")
    async with Orchestrator(boss) as tasks:
        with pytest.raises(InvalidMessage):
            await tasks.submit("job", {}, id="t-1", priority=9)
        with pytest.raises(InvalidMessage):
            await tasks.submit_many([Message(type="job", id="t-1"), Message(type="")])
        assert await tasks.status("t-1") == "unknown"
    assert await events_of(boss, "t-1") == []


async def test_a_task_is_accepted_while_the_store_cannot_write(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    """The broker has it; the worker that claims it writes the event that is missing."""
    app, boss = (
        App(Config(home=home, broker=server.url, default_queue="stream:task"), name=name)
        for name in ("w", "boss")
    )

    @app.on("job")
    async def job(ctx: Context) -> None:
        return None

    async with Orchestrator(boss) as tasks, asyncio.timeout(LIMIT_S):

        async def away(subscription: str, batch: Any) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(tasks._desk, "submitted", away)
        task = await tasks.submit("job", {})
        assert await events_of(boss, task.id) == []
        async with working(app):
            await tasks.wait(task.id)
    kinds = await events_of(boss, task.id)
    assert kinds == ["task.created", "task.claimed", "task.succeeded"]


async def test_the_end_of_a_task_is_known_after_its_row_is_gone(make_app: MakeApp):
    app = make_app("worker")

    @app.on("fine")
    async def fine(ctx: Context) -> None:
        return None

    async with Orchestrator(make_app("boss")) as tasks, asyncio.timeout(LIMIT_S):
        done = await tasks.submit("fine", {})
        ended = await tasks.submit("fine", {})
        await tasks.cancel(ended.id)
        async with working(app):
            await tasks.wait(done.id)

        async def no_row(task_id: str, tenant_id: str) -> None:
            return None

        tasks._task = no_row  # type: ignore[method-assign]
        assert await tasks.status(done.id) == "succeeded"
        assert await tasks.status(ended.id) == "failed"


async def test_a_task_that_waits_for_a_person_says_so(make_app: MakeApp):
    app = make_app("worker")

    @app.on("payout")
    async def payout(ctx: Context) -> str:
        return "paid"

    @app.guard
    async def guard(context: Any) -> Decision:
        asked = None if "big" in context["approved"] else Ask(rule="big")
        return Decision(allowed=asked is None, reason="more than 1000", ask=asked)

    async with Orchestrator(make_app("boss")) as tasks, asyncio.timeout(LIMIT_S), working(app):
        task = await tasks.submit("payout", {"amount": 5000})
        async with operating(app) as (records, operations):
            approvals = Approvals(records, operations)
            while await tasks.status(task.id) in ("queued", "running"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await tasks.status(task.id) == "waiting_approval"
            assert await tasks.result(task.id) is None
            await approvals.approve(await approvals.find(task.id), by="anna", note="")
        assert (await tasks.wait(task.id)).result == "paid"


# ── an app that others use, too ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("opened_by", ["worker", "open", "orchestrator"])
async def test_an_app_that_others_use_stays_open(make_app: MakeApp, opened_by: str):
    app = make_app("both")
    ran = asyncio.Queue[str]()

    @app.on("job")
    async def job(ctx: Context) -> None:
        ran.put_nowait(ctx.message.id)

    async with AsyncExitStack() as around, asyncio.timeout(LIMIT_S):
        orchestrator = Orchestrator(app)
        if opened_by == "open":
            await app.open()
            around.push_async_callback(app.close)
        elif opened_by == "worker":
            await around.enter_async_context(working(app))
        else:
            await orchestrator.__aenter__()
            await around.enter_async_context(working(app))
            await orchestrator.__aexit__(None, None, None)
        for _ in range(2):
            async with Orchestrator(app) as tasks:
                task = await tasks.submit("job", {})
                if opened_by != "open":
                    assert (await tasks.wait(task.id)).ok
                    assert await ran.get() == task.id
        late = await app.send("job", {})  # the app is open, and its worker works
        if opened_by != "open":
            assert await ran.get() == late.id
    with pytest.raises(RuntimeError, match="not open"):
        _ = app.store


async def test_an_app_that_nobody_else_uses_is_closed(make_app: MakeApp):
    app = make_app("boss")
    for _ in range(2):
        orchestrators = [Orchestrator(app) for _ in range(3)]
        await asyncio.gather(*(each.__aenter__() for each in orchestrators))
        store = app.store
        for each in orchestrators:
            assert app.store is store
            await each.__aexit__(None, None, None)
        with pytest.raises(RuntimeError, match="not open"):
            _ = app.store


async def test_what_does_not_run_is_cancelled_at_once(make_app: MakeApp):
    app, ran = make_app("worker"), []
    failed = asyncio.Event()

    @app.on("job")
    async def job(ctx: Context) -> None:
        ran.append(ctx.message.id)
        if ctx.payload.get("fail"):
            failed.set()
            raise TemporaryError("later", retry_after_s=3600)

    async with Orchestrator(make_app("boss")) as tasks, asyncio.timeout(LIMIT_S):
        early = await tasks.submit("job", {})
        assert await tasks.cancel(early.id, reason="changed my mind") is Cancelled.ENDED
        assert await tasks.cancel(early.id) is Cancelled.OVER
        async with working(app):
            late = await tasks.submit("job", {"fail": True})
            await failed.wait()
            while await tasks.status(late.id) == "running":  # noqa: ASYNC110 - its commit
                await asyncio.sleep(0.01)
            assert await tasks.status(late.id) == "queued"
            assert await tasks.cancel(late.id) is Cancelled.ENDED
            last = await tasks.submit("job", {})
            await tasks.wait(last.id)
        for task, reason in ((early, "changed my mind"), (late, "cancelled")):
            result = await tasks.wait(task.id)
            assert (result.status, result.error) == ("failed", f"discarded: {reason}")
    assert sorted(ran) == sorted([late.id, last.id]), "a cancelled task ran"


async def test_what_runs_is_asked_to_stop(make_app: MakeApp):
    app = make_app("worker")
    runs = asyncio.Event()

    @app.on("job")
    async def job(ctx: Context) -> None:
        runs.set()
        await asyncio.Event().wait()

    async with Orchestrator(make_app("boss")) as tasks, asyncio.timeout(LIMIT_S), working(app):
        task = await tasks.submit("job", {})
        await runs.wait()
        assert await tasks.status(task.id) == "running"
        assert await tasks.cancel(task.id) is Cancelled.ASKED
        result = await tasks.wait(task.id)
        assert (result.status, result.error) == ("failed", "discarded: cancelled")
        assert await tasks.cancel(task.id) is Cancelled.OVER


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=ON_POSTGRES)])
async def test_the_result_of_somebody_elses_worker_is_written_down(
    home: Path, server: RedisServer, client: Any, kind: str, request: pytest.FixtureRequest
):
    store = "sqlite" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    app = App(
        Config(home=home, broker=server.url, default_queue="stream:task", store=store), name="boss"
    )
    async with Orchestrator(app) as tasks, asyncio.timeout(LIMIT_S):
        task = await tasks.submit("search", {"q": 1})
        client.xgroup_create("stream:task", "cg:workers", "0", mkstream=True)
        ((_, [(entry, fields)]),) = client.xreadgroup(
            "cg:workers", "stranger", {"stream:task": ">"}
        )
        assert fields[b"tool_name"] == b"search"
        client.xadd("stream:result", {"task_id": task.id, "status": "maybe"})
        client.xadd("stream:result", {"no": "task"})
        for status in ("succeeded", "failed"):  # the first one counts
            client.xadd(
                "stream:result",
                {
                    "task_id": task.id,
                    "status": status,
                    "result": '{"n": 1}',
                    "error": "",
                    "retry_count": "1",
                    "consumer": "stranger",
                },
            )
        client.xack("stream:task", "cg:workers", entry)
        result = await tasks.wait(task.id)
        assert (result.ok, result.result, result.retry_count) == (True, {"n": 1}, 1)
        while client.xpending("stream:result", "cg:orchestrators")["pending"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert client.xlen("stream:result") == 4, "others read it, too"
    async with app.storage.reading() as records:
        kinds = [event.type for event in await records.events_of("default", task.id)]
        assert kinds == ["task.created", "task.succeeded"]
        (row,) = await records.tasks("default", task.id)
        assert (row.status, row.retry_count, row.result) == ("succeeded", 1, b'{"n": 1}')


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=ON_POSTGRES)])
@pytest.mark.parametrize(
    "field", ["task_id", "tenant_id", "tool_name", "idempotency_key", "error", "consumer"]
)
async def test_a_result_that_no_row_takes_holds_up_no_other(
    home: Path,
    server: RedisServer,
    client: Any,
    kind: str,
    field: str,
    request: pytest.FixtureRequest,
):
    store = "sqlite" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    app = App(
        Config(home=home, broker=server.url, default_queue="stream:task", store=store), name="boss"
    )
    async with Orchestrator(app) as tasks:
        client.xadd("stream:result", {"task_id": "bad", "status": "succeeded", field: "a\0b"})
        client.xadd("stream:result", {"task_id": "good", "status": "succeeded", "result": "1"})
        assert (await tasks.wait("good", timeout_s=LIMIT_S)).result == 1


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=ON_POSTGRES)])
@pytest.mark.parametrize("when", ["0001-01-01T00:00:00+10:00", "9999-12-31T23:59:59-10:00"])
async def test_a_result_of_the_end_of_time_can_be_read(
    home: Path,
    server: RedisServer,
    client: Any,
    kind: str,
    when: str,
    request: pytest.FixtureRequest,
):
    store = "sqlite" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    app = App(
        Config(home=home, broker=server.url, default_queue="stream:task", store=store), name="boss"
    )
    async with Orchestrator(app) as tasks:
        client.xadd("stream:result", {"task_id": "t", "status": "succeeded", "finished_at": when})
        assert (await tasks.wait("t", timeout_s=LIMIT_S)).ok


async def test_results_are_written_down_as_soon_as_the_store_is_back(
    home: Path, server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
):
    app = App(Config(home=home, broker=server.url, default_queue="stream:task"), name="boss")
    async with Orchestrator(app) as tasks:
        record, away = tasks._desk.record, [True]

        async def fails_once(ends: Any) -> int:
            if away:
                away.clear()
                raise StoreUnavailable("away")
            return await record(ends)

        monkeypatch.setattr(tasks._desk, "record", fails_once)
        client.xadd("stream:result", {"task_id": "t", "status": "succeeded", "result": "1"})
        assert (await tasks.wait("t", timeout_s=LIMIT_S)).result == 1
    assert not away
