"""The faulty broker does what its plan says, no more, and counts it."""

import asyncio
from collections import Counter

import pytest

from ackbone.brokers.memory import MemoryBroker
from ackbone.core.broker import Broker, Delivery, Outgoing, Settlement, Subscription, Verb
from ackbone.core.errors import BrokerUnavailable, PublishUnknown
from ackbone.testing import BrokerConformance
from tests import sources
from tests.faulty import Fault, FaultyBroker, chaos

SUB = Subscription(name="q", queue="q")


class TestWithoutFaultsItIsTheInnerBroker(BrokerConformance):
    quiet_s = 0.02
    delay_s = 0.1
    tolerance_s = 2.0

    async def make_broker(self) -> FaultyBroker:
        return FaultyBroker(MemoryBroker())

    async def second_client(self, first: Broker) -> FaultyBroker:
        assert isinstance(first, FaultyBroker)
        assert isinstance(first.inner, MemoryBroker)
        return FaultyBroker(first.inner.connect())

    async def restart(self, broker: Broker) -> None:
        await broker.close()
        await broker.open()


@pytest.fixture
async def faulty():
    broker = FaultyBroker(MemoryBroker())
    await broker.open()
    yield broker
    await broker.close()


def out(*bodies: bytes) -> list[Outgoing]:
    return [Outgoing(id=body.decode(), body=body) for body in bodies]


async def receive(broker: Broker, limit: int = 10) -> list[Delivery]:
    return list(await sources.receive(broker, SUB, limit=limit, wait=0))


async def bodies(broker: Broker) -> list[bytes]:
    return [delivery.body for delivery in await receive(broker)]


async def test_raise_before_does_nothing(faulty: FaultyBroker) -> None:
    faulty.script("publish", Fault.RAISE_BEFORE)
    with pytest.raises(BrokerUnavailable, match="raise_before at publish"):
        await faulty.publish("q", out(b"a"))
    assert await bodies(faulty) == []
    await faulty.publish("q", out(b"b"))
    assert await bodies(faulty) == [b"b"]
    assert faulty.faults == {("publish", Fault.RAISE_BEFORE): 1}
    assert faulty.calls == {"open": 1, "publish": 2, "receive": 2}


async def test_raise_after_hides_the_outcome(faulty: FaultyBroker) -> None:
    faulty.script("publish", None, Fault.RAISE_AFTER)
    await faulty.publish("q", out(b"a"))
    with pytest.raises(PublishUnknown) as caught:
        await faulty.publish("q", out(b"b"))
    assert caught.value.message_ids == ["b"]
    assert await bodies(faulty) == [b"a", b"b"]


async def test_settle_with_unknown_outcome(faulty: FaultyBroker) -> None:
    await faulty.publish("q", out(b"a"))
    (got,) = await receive(faulty)
    faulty.script("settle", Fault.RAISE_AFTER)
    with pytest.raises(BrokerUnavailable):
        await sources.settle(faulty, SUB, [Settlement(delivery=got, verb=Verb.ACK)])
    await faulty.close()
    await faulty.open()
    assert await bodies(faulty) == []


async def test_hang_until_woken_then_done(faulty: FaultyBroker) -> None:
    faulty.script("publish", Fault.HANG)
    call = asyncio.create_task(faulty.publish("q", out(b"a")))
    assert await faulty.stuck.wait() == "publish"
    assert await bodies(faulty) == []
    assert not call.done()
    faulty.wake()
    assert [result.ok for result in await call] == [True]
    assert await bodies(faulty) == [b"a"]


async def test_waking_lets_go_of_those_that_hang_now_only(faulty: FaultyBroker) -> None:
    faulty.script("publish", Fault.HANG, Fault.HANG)
    first = asyncio.create_task(faulty.publish("q", out(b"a")))
    await faulty.stuck.wait(1)
    faulty.wake()
    await first
    second = asyncio.create_task(faulty.publish("q", out(b"b")))
    await faulty.stuck.wait(2)
    assert not second.done()
    faulty.wake()
    await second


async def test_drop_does_it_and_stays_silent(faulty: FaultyBroker) -> None:
    faulty.script("publish", Fault.DROP)
    call = asyncio.create_task(faulty.publish("q", out(b"a")))
    await faulty.stuck.wait()
    assert await bodies(faulty) == [b"a"]
    assert not call.done()
    faulty.wake()
    with pytest.raises(PublishUnknown):
        await call


async def test_a_dropped_receive_leaves_the_deliveries_in_flight(faulty: FaultyBroker) -> None:
    await faulty.publish("q", out(b"a"))
    faulty.script("receive", Fault.DROP)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await receive(faulty)
    assert await bodies(faulty) == []
    await faulty.close()
    await faulty.open()
    assert await bodies(faulty) == [b"a"]


async def test_duplicate_publish_makes_two_copies(faulty: FaultyBroker) -> None:
    faulty.script("publish", Fault.DUPLICATE)
    results = await faulty.publish("q", out(b"a", b"b"))
    assert [result.id for result in results] == ["a", "b"]
    assert Counter(await bodies(faulty)) == {b"a": 2, b"b": 2}


async def test_duplicate_receive_comes_again_in_the_next_call(faulty: FaultyBroker) -> None:
    await faulty.publish("q", out(b"a", b"b", b"c"))
    faulty.script("receive", Fault.DUPLICATE)
    first = await receive(faulty, limit=2)
    again = await receive(faulty, limit=1) + await receive(faulty, limit=5)
    assert again == first
    assert await bodies(faulty) == [b"c"]


async def test_reorder_keeps_the_batch_whole(faulty: FaultyBroker) -> None:
    names = [b"%02d" % i for i in range(20)]
    await faulty.publish("q", out(*names))
    faulty.script("receive", Fault.REORDER)
    got = [delivery.body for delivery in await receive(faulty, limit=20)]
    assert got != names
    assert sorted(got) == names


async def test_an_outage_refuses_everything_until_it_is_over(faulty: FaultyBroker) -> None:
    faulty.go_down("switched off")
    for call in (faulty.publish("q", out(b"a")), receive(faulty), sources.settle(faulty, SUB, [])):
        with pytest.raises(BrokerUnavailable, match="switched off"):
            await call
    health = await faulty.health()
    assert (health.ok, health.detail) == (False, "switched off")
    faulty.come_back()
    assert (await faulty.health()).ok
    await faulty.publish("q", out(b"a"))
    assert await bodies(faulty) == [b"a"]


async def faults_of(seed: int) -> list[str]:
    plan = chaos(seed, publish={Fault.RAISE_BEFORE: 0.2, Fault.RAISE_AFTER: 0.2})
    broker = FaultyBroker(MemoryBroker(), plan)
    await broker.open()
    seen = []
    for i in range(200):
        try:
            await broker.publish("q", out(b"%d" % i))
            seen.append("ok")
        except PublishUnknown:
            seen.append("after")
        except BrokerUnavailable:
            seen.append("before")
    stored = len(await sources.receive(broker, SUB, limit=500, wait=0))
    assert stored == len(seen) - broker.faults["publish", Fault.RAISE_BEFORE]
    assert broker.faults["publish", Fault.RAISE_AFTER] == seen.count("after")
    await broker.close()
    return seen


async def test_dice_are_repeatable_and_roughly_fair() -> None:
    first = await faults_of(7)
    assert first == await faults_of(7)
    assert first != await faults_of(8)
    counted = Counter(first)
    assert all(20 <= counted[kind] <= 60 for kind in ("before", "after")), counted


async def test_a_script_goes_before_the_dice() -> None:
    broker = FaultyBroker(MemoryBroker(), chaos(1, publish={Fault.RAISE_BEFORE: 1.0}))
    broker.script("publish", None)
    await broker.open()
    await broker.publish("q", out(b"a"))
    with pytest.raises(BrokerUnavailable):
        await broker.publish("q", out(b"b"))
    await broker.close()


def test_plans_without_meaning_are_refused() -> None:
    broker = FaultyBroker(MemoryBroker())
    with pytest.raises(ValueError, match="no meaning for settle"):
        broker.script("settle", Fault.REORDER)
    with pytest.raises(ValueError, match="'send' is no method"):
        broker.script("send", Fault.HANG)
    with pytest.raises(ValueError, match="add up to more than 1"):
        chaos(1, publish={Fault.HANG: 0.7, Fault.DROP: 0.7})
    with pytest.raises(ValueError, match="no meaning for open"):
        chaos(1, open={Fault.DUPLICATE: 0.1})
