"""What a fetcher asks for, and what it has in its hands when it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ackbone.brokers.memory import MemoryBroker
from ackbone.core.broker import Delivery, Outgoing, Subscription
from ackbone.core.clock import SystemClock
from ackbone.core.codecs.standard import StandardCodec
from ackbone.core.errors import StoreUnavailable
from ackbone.core.message import Message
from ackbone.core.store import Answer, Candidate, Run, Taken, Verdict, Worker
from ackbone.engine.fetcher import BrokerFetcher, TakeFetcher
from ackbone.engine.flow import Flow, Slots
from ackbone.engine.outages import Outages
from ackbone.engine.steps import Steps
from ackbone.engine.wiring import Ports
from tests import sources

SUB = Subscription(name="jobs", queue="jobs", ordered=False)


class Idle:
    """A worker that starts nothing."""

    def wait_s(self, sub: Subscription) -> float:
        return 0.0

    def start(self, verdicts: Sequence[Verdict], sub: Subscription) -> int:
        return len(verdicts)

    def unclaimed(self, sub: Subscription, messages: int) -> None: ...


def steps_on(store: Any, broker: MemoryBroker | None) -> Steps:
    ports = Ports(store=store, broker_of=lambda queue: broker, clock=SystemClock())
    return Steps(ports, Outages())


class Away:
    """A store that is away."""

    async def claim(self, sub: Subscription, batch: Sequence[Candidate], **_: Any) -> None:
        raise StoreUnavailable("away")


@pytest.mark.parametrize("slots_left", [0, 4], ids=["no slot is left", "the store is away"])
async def test_what_was_received_and_not_claimed_goes_back(
    slots_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker()
    await broker.open()
    sent = [Message(type="n", id=f"m{n}") for n in range(4)]
    bodies = [StandardCodec().encode(message)[0] for message in sent]
    await broker.publish(
        "jobs", [Outgoing(id=m.id, body=body) for m, body in zip(sent, bodies, strict=True)]
    )
    slots, in_hand, receive = Slots(4), asyncio.Event(), broker._receive

    async def receive_and_lose_the_slots(*args: Any, **options: Any) -> Sequence[Delivery]:
        found = await receive(*args, **options)
        slots.take(4 - slots_left)  # as the fetcher beside it does
        in_hand.set()
        return found

    monkeypatch.setattr(broker, "_receive", receive_and_lose_the_slots)
    fetcher = BrokerFetcher(SUB, steps_on(Away(), broker), slots, cast(Flow, Idle()))
    fetching = asyncio.ensure_future(fetcher._fetch(4))
    await in_hand.wait()
    for _ in range(10):
        await asyncio.sleep(0)  # on to where it waits
    fetching.cancel()
    await asyncio.wait({fetching})
    assert fetching.cancelled()
    again = await receive(SUB, limit=10, wait=0.0)
    assert [delivery.body for delivery in again] == bodies
    await broker.close()


async def test_whoever_waits_for_a_slot_finds_one() -> None:
    """Two were woken by one free slot, and the other was faster: no room is no answer."""
    slots = Slots(1)
    slots.take(1)
    waiting = [asyncio.ensure_future(slots.reserve(1)), asyncio.ensure_future(slots.room())]
    await asyncio.sleep(0)
    slots.give(1)
    assert await waiting[0] == 1
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting[1].done()
    slots.give(1)
    assert await waiting[1] == 1


class Endless:
    """A store that always has as much as it is asked for, and notes how much that was."""

    def __init__(self, until: int) -> None:
        self.asked: list[int] = []
        self._until = until
        self.enough = asyncio.Event()

    def subscribe(self) -> asyncio.Event:
        return asyncio.Event()

    def unsubscribe(self, event: asyncio.Event) -> None: ...

    async def take(self, sub: Subscription, decode: Any, *, limit: int, worker: Worker) -> Taken:
        self.asked.append(limit)
        if sum(self.asked) >= self._until:
            self.enough.set()
        run = cast(Run, object())
        return Taken(verdicts=[Verdict(answer=Answer.RUN, run=run)] * limit)


@pytest.mark.parametrize(
    ("size", "asked"),
    [(8, [8]), (100, [100]), (150, [100, 50]), (200, [100, 100]), (1000, [500, 500])],
)
async def test_slots_are_filled_in_two_halves(size: int, asked: list[int]) -> None:
    """At once, without waiting for news in between: what was found was all that was asked for."""
    store = Endless(size)
    fetcher = TakeFetcher(SUB, steps_on(store, None), Slots(size), cast(Flow, Idle()))
    fetching = asyncio.ensure_future(fetcher.run())
    async with asyncio.timeout(0.9):  # less than a fetcher waits for news
        await store.enough.wait()
    fetching.cancel()
    await asyncio.wait({fetching})
    assert store.asked == asked


class Slow:
    """A store that grants every claim, when it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.go_on = asyncio.Event()

    def subscribe(self) -> asyncio.Event:
        return asyncio.Event()

    def unsubscribe(self, event: asyncio.Event) -> None: ...

    async def claim(self, sub: Subscription, batch: Sequence[Candidate], **_: Any) -> list[Verdict]:
        self.asked.append([each.message.id for each in batch if each.message is not None])
        await self.go_on.wait()
        granted = [(cast(Run, SimpleNamespace(delivery=c.delivery)), c.delivery) for c in batch]
        return [Verdict(answer=Answer.RUN, run=run, delivery=copy) for run, copy in granted]


class Counting(Idle):
    started = 0

    def start(self, verdicts: Sequence[Verdict], sub: Subscription) -> int:
        self.started += len(verdicts)
        return len(verdicts)


async def filled(broker: MemoryBroker, count: int) -> list[str]:
    await broker.open()
    sent = [Message(type="n", id=f"m{n:04}") for n in range(count)]
    bodies = [StandardCodec().encode(message)[0] for message in sent]
    out = [Outgoing(id=m.id, body=body) for m, body in zip(sent, bodies, strict=True)]
    await broker.publish("jobs", out)
    return [message.id for message in sent]


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class SmallBatches(MemoryBroker):
    """A broker whose answers hold a hundred messages at most."""

    async def _receive(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        return await super()._receive(sub, min(limit, 100), wait)


@dataclass
class Fetching:
    """A fetcher at work on messages that wait, beside a store that answers when it is told to."""

    broker: MemoryBroker
    slots: Slots
    sent: list[str]
    store: Slow = field(default_factory=Slow)
    worker: Counting = field(default_factory=Counting)

    def __post_init__(self) -> None:
        steps = steps_on(self.store, self.broker)
        fetcher = BrokerFetcher(SUB, steps, self.slots, cast(Flow, self.worker))
        self.task = asyncio.ensure_future(fetcher.run())

    async def stop(self) -> None:
        self.task.cancel()
        await turns()
        self.store.go_on.set()  # the answers to the claims that it asked for
        await asyncio.wait({self.task})

    async def left(self) -> list[str]:
        """What nobody has in hand; it is in ours then."""
        found = await sources.receive(self.broker, SUB, limit=400, wait=0.0)
        return [StandardCodec().decode(each, SUB).id for each in found]


@contextlib.asynccontextmanager
async def fetching(broker: MemoryBroker, count: int, slots: int) -> AsyncIterator[Fetching]:
    found = Fetching(broker, Slots(slots), await filled(broker, count))
    await turns()
    yield found
    await found.stop()
    await broker.close()


async def test_two_batches_are_claimed_at_a_time() -> None:
    """The store has the second at hand when the first is done, before anything of that one runs."""
    async with fetching(SmallBatches(), 400, slots=400) as at:
        sent = at.sent
        assert at.store.asked == [sent[:100], sent[100:200]]
        assert at.slots.taken == 200
        at.store.go_on.set()
        await turns()
        assert at.store.asked == [sent[:100], sent[100:200], sent[200:300], sent[300:]]
        assert (at.worker.started, at.slots.free) == (400, 0)


async def test_no_more_is_in_hand_than_there_are_slots_for() -> None:
    async with fetching(MemoryBroker(), 400, slots=200) as at:
        assert at.store.asked == [at.sent[:100], at.sent[100:200]]
        assert await at.left() == at.sent[200:]
        at.store.go_on.set()
        await turns()
        assert len(at.store.asked) == 2
        assert (at.worker.started, at.slots.free) == (200, 0)


async def test_a_fetcher_that_is_stopped_starts_what_is_claimed_and_hands_back_the_rest() -> None:
    async with fetching(SmallBatches(), 300, slots=400) as at:
        assert await at.left() == [], "two batches are claimed, and the next is read meanwhile"
        await at.stop()
        assert at.store.asked == [at.sent[:100], at.sent[100:200]]
        assert (at.worker.started, at.slots.taken) == (200, 200)
        assert await at.left() == at.sent[200:]


async def test_an_error_of_a_claim_ends_the_fetcher() -> None:
    class Broken(Slow):
        async def claim(self, *_: Any, **__: Any) -> list[Verdict]:
            raise RuntimeError("a bug")

    broker, slots = MemoryBroker(), Slots(200)
    await filled(broker, 100)
    fetcher = BrokerFetcher(SUB, steps_on(Broken(), broker), slots, cast(Flow, Idle()))
    with pytest.raises(RuntimeError, match="a bug"):
        await fetcher.run()
    assert slots.taken == 0
    assert len(await sources.receive(broker, SUB, limit=400, wait=0.0)) == 100, (
        "all were handed back"
    )
    await broker.close()
