"""A message that only Redis holds is ended, and reported, once Redis has lost it; not before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context
from ackbone.admin.dead_letters import DeadLetters
from ackbone.config import Config, Queue
from ackbone.core.broker import Delivery, Shows, Subscription
from ackbone.core.errors import BrokerError, ParkMessage
from ackbone.core.records import DeadLetter, LetterFilter
from ackbone.core.store import Answer, Worker
from ackbone.engine.decoder import decoder
from ackbone.engine.lost_copies import LostCopies
from tests import sources
from tests.integration.lab import Lab
from tests.servers.redis import RedisServer
from tests.servers.stores import STORES, store_url

PATIENCE_S = 30.0


class Scene:
    """An app on Redis whose worker took a message and left, and a worker that looks after it."""

    def __init__(self, app: App, worker: Worker) -> None:
        self.app = app
        self.worker = worker
        (self.sub,) = app.subscriptions()

    async def received(self) -> Sequence[Delivery]:
        return await sources.receive(self.app.broker, self.sub, limit=10, wait=PATIENCE_S)

    async def claim(self, copies: Sequence[Delivery], worker: Worker) -> list[Answer]:
        decode = decoder(self.sub)
        batch = [decode(copy) for copy in copies]
        verdicts = await self.app.store.claim(self.sub, batch, worker=worker)
        return [verdict.answer for verdict in verdicts]

    async def run_and_leave(self) -> None:
        """The message's row is `open` then, and its copy is pending."""
        gone = await self.app.store.register("gone")
        copies = await self.received()
        assert await self.claim(copies, gone) == [Answer.RUN]
        await self.app.store.leave(gone)

    async def look(self) -> None:
        broker: object = self.app.broker
        assert isinstance(broker, Shows)
        copies = self.app.storage.copies(self.app.store)
        await LostCopies(copies, broker, [self.sub], after_s=0.0).step(self.worker)

    async def status(self) -> dict[str, int]:
        counts = await self.app.storage.records(self.app.store).counts()
        return {each.kind: each.count for each in counts}

    async def letters(self) -> Sequence[DeadLetter]:
        records = self.app.storage.records(self.app.store)
        found = await records.letters(LetterFilter(reason="copy_lost"), limit=10)
        return await records.letters_by_id([letter.id for letter in found])


@pytest.fixture(params=STORES)
async def scene(
    request: pytest.FixtureRequest, home: Path, server: RedisServer, client: Any
) -> AsyncIterator[Scene]:
    url = store_url(request)
    settings: dict[str, Any] = {} if url is None else {"store": url}
    config = Config(home=home, broker=server.url, queues={"jobs": Queue(ordered=False)}, **settings)
    async with App(config) as app:
        worker = await app.store.register("looks")
        yield Scene(app, worker)


async def test_a_message_whose_copy_is_gone_becomes_a_dead_letter(
    scene: Scene, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sent = await scene.app.send("n", {"a": 1}, queue="jobs", idempotency_key="k")
    await scene.run_and_leave()
    twin = await scene.app.send("n", {"a": 1}, queue="jobs", idempotency_key="k")
    assert await scene.claim(await scene.received(), scene.worker) == [Answer.WAITING]
    await scene.look()
    assert await scene.status() == {"open": 1, "waiting_key": 1}, "its copy is pending"
    client.flushall()
    await scene.look()
    assert await scene.status() == {"failed": 1, "ready": 1}, "the key is free for its twin"
    (letter,) = await scene.letters()
    assert (letter.message_id, letter.body, letter.type) == (sent.id, None, "n")
    assert f"lost its copies of 1 messages, {sent.id} among them" in caplog.text
    ready = await scene.app.store.claim_ready(scene.sub, limit=5, worker=scene.worker)
    assert [verdict.run.message.id for verdict in ready if verdict.run] == [twin.id]
    await scene.look()
    assert len(await scene.letters()) == 1


async def test_a_copy_that_comes_after_all_completes_the_dead_letter(
    scene: Scene, client: Any
) -> None:
    sent = await scene.app.send("n", {"a": 1}, queue="jobs")
    await scene.run_and_leave()
    client.flushall()
    await scene.look()
    await scene.app.send("n", {"a": 1}, queue="jobs", id=sent.id)
    assert await scene.claim(await scene.received(), scene.worker) == [Answer.FINAL]
    (letter,) = await scene.letters()
    message = DeadLetters(scene.app.storage.records(scene.app.store)).read(letter).message
    assert message is not None
    assert message.payload == {"a": 1}


async def test_a_copy_that_was_sent_again_and_waits_unread_counts(
    scene: Scene, client: Any
) -> None:
    sent = await scene.app.send("n", {"a": 1}, queue="jobs")
    await scene.run_and_leave()
    client.delete("jobs")
    for n in range(250):
        await scene.app.send("n", n, queue="jobs", priority=2)
    await scene.app.send("n", {"a": 1}, queue="jobs", id=sent.id, priority=2)
    await scene.look()
    assert await scene.status() == {"open": 1}


async def test_a_copy_that_is_claimed_after_the_look_is_not_lost(
    scene: Scene, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sent = await scene.app.send("n", {"a": 1}, queue="jobs")
    await scene.run_and_leave()
    client.flushall()
    copies = scene.app.storage.copies(scene.app.store)
    ended = await copies.end(
        scene.sub.name, [("default", sent.id)], for_s=60.0, worker=scene.worker
    )
    assert ended == 0, "it has not waited for so long"

    class ComesLate:
        async def copies(self, sub: Subscription) -> AsyncIterator[Sequence[Delivery]]:
            yield []
            await scene.app.send("n", {"a": 1}, queue="jobs", id=sent.id)
            assert await scene.claim(await scene.received(), scene.worker) == [Answer.RUN]

    await LostCopies(copies, ComesLate(), [scene.sub], after_s=0.0).step(scene.worker)
    assert await scene.status() == {"running": 1}
    assert "lost its copies" not in caplog.text


async def test_a_backlog_that_is_too_long_to_look_through_ends_nothing(
    scene: Scene, client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ackbone.engine.lost_copies.MOST", 2)
    await scene.app.send("n", queue="jobs")
    await scene.run_and_leave()
    client.delete("jobs")
    for n in range(3):
        await scene.app.send("n", n, queue="jobs")
    await scene.look()
    assert await scene.status() == {"open": 1}
    assert "too long to look for their copies" in caplog.text


async def test_a_server_that_does_not_answer_the_question_loses_nothing(
    scene: Scene, client: Any
) -> None:
    await scene.app.send("n", queue="jobs")
    await scene.run_and_leave()
    client.delete("jobs")
    client.set("jobs", "no stream")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await scene.look()
    assert await scene.status() == {"open": 1}
    client.delete("jobs")


async def test_until_idle_ends_where_only_lost_messages_are_left(
    scene: Scene, client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ackbone.composition.idle.STUCK_S", 0.2)
    await scene.app.send("n", queue="jobs")
    await scene.run_and_leave()
    client.flushall()
    async with asyncio.timeout(PATIENCE_S):
        await scene.app.work(until_idle=True)
    assert "1 messages are left that no worker can run" in caplog.text


async def test_until_idle_ends_where_all_wait_behind_a_parked_message(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One waits for its conversation, one for its key."""
    monkeypatch.setattr("ackbone.composition.idle.STUCK_S", 0.2)
    app = await lab.open()

    @app.on("chat")
    async def chat(ctx: Context) -> None:
        if ctx.payload == "park":
            raise ParkMessage("ask first", kind="waiting_approval")

    head = await app.send("chat", "park", ordering_key="a")
    await app.send("chat", "next", ordering_key="a")
    await app.send("chat", "park", idempotency_key="k")
    await app.send("chat", "twin", idempotency_key="k")
    done = await app.send("chat", "runs")
    async with asyncio.timeout(PATIENCE_S):
        await app.work(until_idle=True)
    assert (lab.status(head.id), lab.status(done.id)) == ("parked", "succeeded")
    assert "2 messages are left that no worker can run" in caplog.text
