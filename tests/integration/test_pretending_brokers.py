"""The engine on brokers with other capabilities: a memory broker pretends to have them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Config, Context
from ackbone.brokers.pretending import PretendingSource
from ackbone.core.broker import Delivery, Identity, Outgoing, Settlement, Verb
from ackbone.core.errors import ConfigError
from ackbone.engine.worker import EngineWorker
from ackbone.testing import PretendingBroker
from tests.integration.lab import MEMORY, Lab


@pytest.fixture
async def lab(home: Path, schema: Path) -> AsyncIterator[Lab]:
    lab = Lab(home, MEMORY, schema)
    yield lab
    await lab.close()


@asynccontextmanager
async def opened(lab: Lab, broker: PretendingBroker, **settings: Any) -> AsyncIterator[App]:
    queue = {"codec": "text", **settings.pop("queue", {})}
    app = await lab.open(queues={"q": queue}, **settings)
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
    broker = PretendingBroker(identity=Identity.NONE)
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
    broker = PretendingBroker(identity=Identity.NONE)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        handler.may_end.set()
        await broker.publish("q", [Outgoing(id=name, body=b"same") for name in ("a", "b")])
        await lab.start(app)
        await lab.until(lambda: len(held(lab)) == 2 and {s for s, _ in held(lab)} == {"succeeded"})
    assert handler.ran == ["same", "same"]


async def test_a_run_over_the_hold_limit_is_adopted_and_commits_once(lab: Lab) -> None:
    broker = PretendingBroker(hold_limit_s=0.6)
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
    broker = PretendingBroker(hold_limit_s=0.6)
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
    broker = PretendingBroker(hold_limit_s=3600.0)
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
    broker = PretendingBroker(release=release)
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


async def test_a_long_run_keeps_a_lease_of_two_seconds(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended = 0
    extend = PretendingSource.extend

    async def counted(source: PretendingSource, batch: Sequence[Delivery]) -> None:
        nonlocal extended
        extended += 1
        await extend(source, batch)

    monkeypatch.setattr(PretendingSource, "extend", counted)
    broker = PretendingBroker(lease_s=2.0)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        await broker.publish("q", texts(3))
        await lab.start(app)
        await lab.until(lambda: extended >= 12, "three leases have passed, extended each 0.5 s")
        assert held(lab) == [("running", "broker")] * 3, "no copy came again"
        handler.may_end.set()
        await lab.until(lambda: held(lab) == [("succeeded", "broker")] * 3)
        await lab.until(lambda: broker.in_flight == 0)
    assert sorted(handler.ran) == [f"text {n}" for n in range(3)]


async def test_a_copy_that_comes_again_while_its_message_runs_is_adopted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody extends the lease, as where the event loop stood still."""

    async def lost(source: PretendingSource, batch: Sequence[Delivery]) -> None:
        return

    monkeypatch.setattr(PretendingSource, "extend", lost)
    broker = PretendingBroker(lease_s=0.5)
    async with opened(lab, broker) as app:
        handler = Waits(app)
        await broker.publish("q", texts(3))
        await lab.start(app)
        await lab.until(lambda: held(lab) == [("running", "store")] * 3)
        handler.may_end.set()
        await lab.until(lambda: held(lab) == [("succeeded", "store")] * 3)
        await lab.until(lambda: broker.in_flight == 0)
    assert sorted(handler.ran) == [f"text {n}" for n in range(3)]


async def test_deliveries_in_chunks_of_ten(lab: Lab) -> None:
    broker = PretendingBroker("sqs")
    async with opened(lab, broker, worker={"slots": 64}) as app:
        handler = Waits(app)
        await broker.publish("q", texts(100))
        await lab.start(app)
        await lab.until(lambda: len(handler.ran) == 64, "all slots are filled, ten at a time")
        handler.may_end.set()
        await lab.until(lambda: held(lab) == [("succeeded", "broker")] * 100)
    assert sorted(handler.ran) == sorted(f"text {n}" for n in range(100))


@pytest.mark.parametrize("policy", ["nack", "dlq"])
async def test_a_copy_of_a_failed_message_is_rejected_until_that_succeeds(
    lab: Lab, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that counts deliveries would end it by itself, under a reason of its own."""
    broker = PretendingBroker(lease_s=0.3)
    told: list[tuple[Verb, str]] = []
    settle = broker._settle

    async def twice_lost(batch: Sequence[Settlement]) -> Any:
        told.extend((each.verb, each.reason) for each in batch)
        return await settle(batch) if len(told) > 2 else []

    monkeypatch.setattr(broker, "_settle", twice_lost)
    async with opened(lab, broker, queue={"ack_policy": policy}) as app:
        ran = []

        @app.on("*", queue="q", retries=0)
        async def fails(ctx: Context) -> None:
            ran.append(ctx.payload)
            raise RuntimeError("too hot")

        await broker.publish("q", texts(1))
        await lab.start(app)
        await lab.until(lambda: broker.in_flight == 0 and len(told) == 3)
    assert ran == ["text 0"]
    (letter,) = lab.letters()
    if policy == "nack":
        assert told == [(Verb.REJECT, letter["reason"])] * 3
        assert [(dead.body, dead.reason) for dead in broker.rejected] == [
            (b"text 0", letter["reason"])
        ]
    else:
        assert [verb for verb, _ in told] == [Verb.ACK] * 3
        assert not broker.rejected


@pytest.mark.parametrize(
    ("policy", "able", "verbs"),
    [
        ("requeue", {"release": True}, [Verb.RELEASE, Verb.ACK]),
        ("requeue", {"release": False}, [Verb.ACK]),
        ("nack", {"reject": True}, [Verb.REJECT]),
        ("nack", {"reject": False}, [Verb.ACK]),
    ],
)
async def test_a_policy_that_the_broker_cannot_carry_out_is_an_acknowledgement(
    lab: Lab, policy: str, able: dict[str, Any], verbs: list[Verb]
) -> None:
    broker = PretendingBroker(**able)
    async with opened(lab, broker, queue={"ack_policy": policy}) as app:

        @app.on("*", queue="q", retries=0)
        async def fails(ctx: Context) -> None:
            raise RuntimeError("too hot")

        await broker.publish("q", texts(1))
        await lab.start(app)
        await lab.until(lambda: len(broker.settled) == len(verbs) and broker.in_flight == 0)
    assert [verb for _, verb in broker.settled] == verbs


@pytest.mark.parametrize("like", ["memory", "kafka", "sqs", "servicebus"])
async def test_an_app_works_on_a_broker_that_its_url_makes_up(home: Path, like: str) -> None:
    app = App(Config(home=home, broker=f"memory://?like={like}"))
    heard: list[int] = []

    @app.on("said")
    async def said(ctx: Context) -> None:
        heard.append(ctx.payload)

    async with app:
        assert isinstance(app.broker, PretendingBroker)
        for n in range(30):
            await app.send("said", n, ordering_key="ada")
        await app.work(until_idle=True)
    assert heard == list(range(30))


@pytest.mark.parametrize("written", ["like=kafk", "liek=kafka", "like=kafka&parts=3", "kafka"])
def test_a_wrong_parameter_of_memory_is_named(home: Path, written: str) -> None:
    with pytest.raises(ConfigError, match="memory, kafka, sqs, servicebus"):
        App(Config(home=home, broker=f"memory://?{written}")).check()
