"""One app with queues on several brokers: they forward to each other, and stop each other never."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context
from ackbone.composition.background import relays_of
from ackbone.config import Config, Queue, Worker
from ackbone.core.errors import BrokerUnavailable, ConfigError
from tests.servers.rabbitmq import NEWEST, RabbitServer
from tests.servers.redis import RedisServer

LIMIT_S = 60.0


def make_app(home: Path, redis_url: str, **settings: Any) -> App:
    return App(
        Config(
            home=home,
            brokers={"events": redis_url, "files": f"sqlite:///{home}/files.db"},
            queues={
                "near": Queue(),
                "far": Queue(broker="events", ordered=False),
                "beside": Queue(broker="files", ordered=False),
            },
            worker=Worker(slots=20, lease_s=5.0),
            **settings,
        )
    )


@asynccontextmanager
async def at_work(app: App):
    async with app:
        worker = app.worker(relays=relays_of(app, spawn_solo=False))
        await worker.begin()
        try:
            yield worker
        finally:
            await worker.drain()


async def until(done: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not done():  # noqa: ASYNC110 - rows of the database
            await asyncio.sleep(0.01)


def ends(home: Path) -> Counter[tuple[str, str]]:
    """How many messages ended, by queue and status."""
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        rows = conn.execute("SELECT queue_name, status FROM queue_executions").fetchall()
    return Counter(rows)


def forwards(app: App, **ways: str | None) -> list[str]:
    """A handler for each queue, which sends on to the next. Returns the queues, as they run."""
    ran: list[str] = []

    def register(queue: str, to: str | None) -> None:
        @app.on("step", queue=queue)
        async def step(ctx: Context) -> None:
            ran.append(queue)
            if to is not None:
                await ctx.send("step", ctx.payload, queue=to)

    for queue, to in ways.items():
        register(queue, to)
    return ran


async def test_a_message_goes_over_three_brokers(home: Path, server: RedisServer, client: Any):
    app = make_app(home, server.url)
    ran = forwards(app, near="far", far="beside", beside=None)
    async with at_work(app):
        receipts = [await app.send("step", n, queue="near") for n in range(50)]
        assert {receipt.durability for receipt in receipts} == {"fsync"}
        assert (await app.send("step", 50, queue="far")).durability == "process"
        done = ("beside", "succeeded")
        await until(lambda: ends(home)[done] == 51)
    assert Counter(ran) == {"near": 50, "far": 51, "beside": 51}
    assert set(ends(home)) == {(queue, "succeeded") for queue in ("near", "far", "beside")}
    assert client.xlen("far") == 0


async def test_a_broker_that_stops_stops_only_its_own_queues(
    home: Path, server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
):
    app = make_app(home, server.url, send_timeout_s=1.0)
    forwards(app, near="beside", beside="far", far=None)
    async with at_work(app):
        await app.send("step", 0, queue="near")
        await until(lambda: ends(home)["far", "succeeded"] == 1)
        server.kill()
        try:
            for n in range(20):
                await app.send("step", n, queue="near")
            await until(lambda: ends(home)["beside", "succeeded"] == 21)
            with pytest.raises(BrokerUnavailable):
                await app.send("step", 99, queue="far")
            assert ends(home)["far", "succeeded"] == 1
        finally:
            server.start()
        await until(lambda: ends(home)["far", "succeeded"] >= 21)
    assert "broker events is unavailable" in caplog.text
    assert "broker events is back" in caplog.text
    assert "the broker is unavailable" not in caplog.text
    assert "broker files" not in caplog.text


async def test_an_app_starts_while_one_of_its_brokers_is_away(
    home: Path, caplog: pytest.LogCaptureFixture
):
    server = RedisServer()
    app = make_app(home, server.url)
    forwards(app, near="far", far=None)
    try:
        async with at_work(app):
            await app.send("step", 1, queue="near")
            await until(lambda: ends(home)["near", "succeeded"] == 1)
            server.start()
            await until(lambda: ends(home)["far", "succeeded"] == 1)
    finally:
        server.remove()
    assert "broker events is unavailable" in caplog.text
    assert "broker events is back" in caplog.text


@pytest.mark.xdist_group("rabbitmq")
async def test_a_broker_that_was_away_at_the_start_is_opened_when_it_is_back(home: Path):
    server = RabbitServer(NEWEST)
    app = make_app(home, server.url)
    try:
        async with app:
            with pytest.raises(BrokerUnavailable, match="queue far is on broker events"):
                await app.send("step", 1, queue="far")
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        await app.send("step", 1, queue="far")
                        break
                    except BrokerUnavailable:
                        await asyncio.sleep(0.05)
    finally:
        server.remove()


async def test_the_embedded_queue_is_worked_while_the_only_server_is_away(
    home: Path, caplog: pytest.LogCaptureFixture
):
    """Even where the worker is the first that binds the server's queues to its store."""
    server = RedisServer()
    app = App(
        Config(
            home=home,
            brokers={"events": server.url},
            queues={"near": Queue(), "far": Queue(broker="events")},
            worker=Worker(slots=20, lease_s=2.0),
        )
    )
    ran = forwards(app, near=None, far=None)
    try:
        async with at_work(app):
            await app.send("step", 1, queue="near")
            await until(lambda: ran == ["near"])
            with pytest.raises(BrokerUnavailable, match="queue far is on broker events, which is"):
                await app.send("step", 2, queue="far")
            server.start()
            await until(lambda: "broker events is back" in caplog.text)
            await app.send("step", 3, queue="far")
            await until(lambda: ran == ["near", "far"])
    finally:
        server.remove()
    said = [r.getMessage() for r in caplog.records if r.name == "ackbone.engine"]
    away = [text for text in said if "broker events is" in text]
    assert len(away) == 2, away


async def test_an_app_does_not_start_without_any_broker(home: Path):
    app = App(Config(home=home, broker="redis://127.0.0.1:1/0"))
    with pytest.raises(BrokerUnavailable):
        await app.open()


def test_a_queue_on_a_broker_that_is_not_there_is_refused(home: Path):
    with pytest.raises(ConfigError, match=r"queues\.q\.broker: there is no broker 'evnts'"):
        Config(home=home, brokers={"events": "memory://"}, queues={"q": Queue(broker="evnts")})
    with pytest.raises(
        ConfigError, match=r"brokers\.default: is the name of the broker in `broker`"
    ):
        Config(home=home, brokers={"default": "memory://"})


def test_results_are_on_the_broker_of_their_tasks(home: Path):
    config = Config(
        home=home,
        brokers={"events": "memory://"},
        queues={"jobs": Queue(broker="events", results="done", dead_letters="failed")},
    )
    assert [config.endpoint(queue).name for queue in ("jobs", "done", "failed", "other")] == [
        "events",
        "events",
        "events",
        "default",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("brokers: {a: 'worker:topsecret@h/0'}", "brokers.a: '***@h/0' is not a known broker"),
        ("queues: {q: {broker: 'redis://u:topsecret@h/0'}}", "queues.q.broker: is a URL"),
        ("brokers: {events: memory}\nqueues: {q: {broker: event}}", "did you mean events?"),
        ("brokers: {a: 'redis://h/0?pasword=topsecret'}", "brokers.a: redis: unknown parameter"),
    ],
)
def test_a_mistake_names_its_place_and_no_secret(home: Path, text: str, says: str):
    (home / "ackbone.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError) as refused:
        App(home / "ackbone.yaml").check()
    assert says in str(refused.value)
    assert "topsecret" not in str(refused.value)
