"""Dead letters that another program's worker put on `stream:dlq`, in each store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context, FinalError
from ackbone.composition.background import relays_of
from ackbone.config import Config
from ackbone.core.broker import Inspectable
from ackbone.core.records import LetterFilter
from ackbone.core.task_protocol import TaskBroker
from ackbone.engine.foreign_dead_letters import REASON, ForeignDeadLetters
from tests.servers.redis import RedisServer
from tests.servers.stores import STORES, store_url

LETTER = {
    "task_id": "t-1",
    "tool_name": "search",
    "payload": '{"q": 1}',
    "error": "boom",
    "retry_count": "3",
    "failed_at": "2026-01-01T00:00:00Z",
}


@pytest.fixture(params=STORES)
def config(request: pytest.FixtureRequest, home: Path, server: RedisServer) -> Config:
    url = store_url(request)
    settings: dict[str, Any] = {} if url is None else {"store": url}
    return Config(home=home, broker=server.url, **{"default_queue": "stream:task", **settings})


async def test_each_is_kept_once_with_its_tenant(config: Config, client: Any) -> None:
    for _ in range(2):  # a task may be given up twice
        client.xadd("stream:dlq", LETTER)
    client.xadd("stream:dlq", {**LETTER, "tenant_id": "acme"})
    client.xadd("stream:dlq", {**LETTER, "dead_letter_id": "ours"})
    client.xadd("stream:dlq", {"task_id": "\0" + "x" * 1000, "error": "\0"})
    async with App(config) as app:
        worker = await app.store.register("looks")
        (sub,) = app.subscriptions()
        assert isinstance(app.broker, TaskBroker)
        letters = ForeignDeadLetters(app.store, app.broker, sub, "stream:dlq")
        await letters.step(worker)
        client.xgroup_destroy("stream:dlq", "ackbone:letters")  # all of it is read again
        for _ in range(2):  # the first step finds that the group is gone
            await letters.step(worker)
        (group,) = client.xinfo_groups("stream:dlq")
        assert (group["lag"], group["pending"]) == (0, 0)
        records = app.storage.records(app.store)
        found = await records.letters(LetterFilter(reason=REASON), limit=10)
    kept = {(letter.tenant_id, letter.message_id, letter.queue, letter.error) for letter in found}
    assert len(found) == 4
    assert ("default", "t-1", "stream:task", "boom") in kept
    assert ("acme", "t-1", "stream:task", "boom") in kept
    assert client.xlen("stream:dlq") == 5
    assert client.xlen("stream:result") == 0


async def test_our_own_are_not_taken_for_others_on_a_broker_without_other_programs(home: Path):
    app = App(Config(home=home, broker="memory://", default_queue="stream:task"))

    @app.on("search")
    async def search(ctx: Context) -> None:
        raise FinalError("no such index")

    async with app:
        worker = app.worker()
        await worker.begin()
        await app.send("search", {"q": 1})
        await app.idle(worker)
        await worker.drain()
        looks = await app.store.register("looks")
        relays = {relay.name: relay for relay in relays_of(app, spawn_solo=False)}
        for name in ("outbox", "letters of stream:task"):
            if name in relays:
                await relays[name].step(looks)
        found = await app.storage.records(app.store).letters(LetterFilter(), limit=10)
        assert isinstance(app.broker, Inspectable)
        stats = {each.queue: each.ready for each in await app.broker.stats()}
    assert [letter.reason for letter in found] == ["final_error"]
    assert stats["stream:dlq"] == 1, "its copy stays there for whoever reads it"
