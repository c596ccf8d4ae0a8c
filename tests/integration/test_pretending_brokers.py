"""The engine on brokers with other capabilities: a memory broker pretends to have them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ackbone import App, Context
from ackbone.brokers.memory import MemoryBroker
from ackbone.core.broker import Delivery, Identity, Outgoing, Settlement, Subscription, Verb
from ackbone.engine.worker import EngineWorker
from tests.integration.lab import MEMORY, Lab


class Pretender(MemoryBroker):
    """A memory broker with other capabilities. It notes what it was told."""

    def __init__(self, **capabilities: Any) -> None:
        super().__init__()
        self.capabilities = msgspec.structs.replace(self.capabilities, **capabilities)
        self.settled: list[tuple[bytes, Verb]] = []

    async def _receive(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        found = await super()._receive(sub, limit, wait)
        if self.capabilities.identity is Identity.BROKER:
            return found
        return [msgspec.structs.replace(delivery, identity=None) for delivery in found]

    async def _settle(self, batch: Sequence[Settlement]) -> Any:
        self.settled += [(each.delivery.body, each.verb) for each in batch]
        return await super()._settle(batch)

    @property
    def in_flight(self) -> int:
        return sum(queue.in_flight for queue in self._space.queues.values())


@pytest.fixture
async def lab(home: Path, schema: Path) -> AsyncIterator[Lab]:
    lab = Lab(home, MEMORY, schema)
    yield lab
    await lab.close()


@asynccontextmanager
async def opened(lab: Lab, broker: Pretender, **settings: Any) -> AsyncIterator[App]:
    app = await lab.open(queues={"q": {"codec": "text"}}, **settings)
    await app.broker.close()
    app.brokers.by_name["default"] = broker
    await broker.open()
    yield app


class Waits:
    """A handler that waits until it may go on."""

    def __init__(self, app: App) -> None:
        self.ran: list[str] = []
        self.may_end = asyncio.Event()

        @app.on("*", queue="q")
        async def wait(ctx: Context) -> None:
            self.ran.append(ctx.payload)
            await self.may_end.wait()


def texts(n: int) -> list[Outgoing]:
    return [Outgoing(id=f"m{i}", body=b"text %d" % i) for i in range(n)]


def held(lab: Lab) -> list[tuple[str, str]]:
    return lab.rows("SELECT status, held FROM queue_executions ORDER BY 1, 2")


async def test_a_message_without_any_id_is_adopted_before_it_runs(lab: Lab) -> None:
    broker = Pretender(identity=Identity.NONE)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        await broker.publish("q", texts(5))
        worker = await lab.start(app)
        await lab.until(lambda: len(handler.ran) == 5)
        await lab.until(lambda: broker.in_flight == 0, "all copies are acknowledged")
        assert held(lab) == [("running", "store")] * 5
        handler.may_end.set()
        await lab.until(lambda: held(lab) == [("succeeded", "store")] * 5)
        await lab.stop(worker)
    assert sorted(handler.ran) == [f"text {n}" for n in range(5)]
    assert sorted(broker.settled) == [(b"text %d" % n, Verb.ACK) for n in range(5)]


async def test_two_messages_without_an_id_and_with_the_same_text_both_run(lab: Lab) -> None:
    broker = Pretender(identity=Identity.NONE)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        handler.may_end.set()
        await broker.publish("q", [Outgoing(id=name, body=b"same") for name in ("a", "b")])
        await lab.start(app)
        await lab.until(lambda: len(held(lab)) == 2 and {s for s, _ in held(lab)} == {"succeeded"})
    assert handler.ran == ["same", "same"]


async def test_a_run_over_the_hold_limit_is_adopted_and_commits_once(lab: Lab) -> None:
    broker = Pretender(hold_limit_s=0.6)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        await broker.publish("q", texts(3))
        worker = await lab.start(app)
        await lab.until(lambda: len(handler.ran) == 3)
        await lab.until(lambda: broker.in_flight == 0, "their copies are acknowledged")
        assert held(lab) == [("running", "store")] * 3
        handler.may_end.set()
        await lab.until(lambda: held(lab) == [("succeeded", "store")] * 3)
        await lab.stop(worker)
    assert [verb for _, verb in broker.settled] == [Verb.ACK] * 3


async def test_a_run_over_the_hold_limit_runs_again_from_the_store_when_its_worker_dies(
    lab: Lab,
) -> None:
    broker = Pretender(hold_limit_s=0.6)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        await broker.publish("q", texts(1))
        worker: EngineWorker = await lab.start(app)
        await lab.until(lambda: broker.in_flight == 0 and handler.ran)
        await lab.stop(worker, 0.0)  # handed back, unfinished
        handler.may_end.set()
        await lab.start(app)
        await lab.until(lambda: held(lab) == [("succeeded", "store")])
    assert handler.ran == ["text 0", "text 0"]
    assert [verb for _, verb in broker.settled] == [Verb.ACK], "the broker has no copy any more"


async def test_a_short_run_keeps_its_copy_at_the_broker(lab: Lab) -> None:
    broker = Pretender(hold_limit_s=3600.0)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        await broker.publish("q", texts(1))
        await lab.start(app)
        await lab.until(lambda: handler.ran)
        assert held(lab) == [("running", "broker")]
        assert broker.in_flight == 1
        handler.may_end.set()
        await lab.until(lambda: held(lab) == [("succeeded", "broker")])
        await lab.until(lambda: broker.in_flight == 0)


@pytest.mark.parametrize("release", [True, False])
async def test_a_broker_that_cannot_release_is_never_asked_to(lab: Lab, release: bool) -> None:
    broker = Pretender(release=release)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        await broker.publish("q", texts(3))
        worker = await lab.start(app)
        await lab.until(lambda: len(handler.ran) == 3)
        await lab.stop(worker, 0.0)
        assert {verb for _, verb in broker.settled} == ({Verb.RELEASE} if release else set())
        await broker.close()  # its copies return to the queue
        await broker.open()
        handler.may_end.set()
        await lab.start(app)
        await lab.until(lambda: held(lab) == [("succeeded", "broker")] * 3)
    assert len(handler.ran) == 6
