"""What the memory broker promises beyond the suite that all brokers pass."""

import asyncio

import pytest

from ackbone.brokers.memory import MemoryBroker
from ackbone.core.broker import Delivery, Inspectable, Outgoing, Settlement, Subscription, Verb
from ackbone.core.errors import BrokerUnavailable, MessageTooLarge
from ackbone.testing import FakeClock
from tests import sources

SUB = Subscription(name="q", queue="q")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def broker(clock: FakeClock):
    memory = MemoryBroker(clock=clock, max_body=100)
    await memory.open()
    yield memory
    await memory.close()


async def receive(broker: MemoryBroker, limit: int = 10, wait: float = 0) -> list[Delivery]:
    return list(await sources.receive(broker, SUB, limit=limit, wait=wait))


async def bodies(broker: MemoryBroker) -> list[bytes]:
    return [delivery.body for delivery in await receive(broker)]


async def test_one_id_twice_is_two_messages(broker: MemoryBroker) -> None:
    await broker.publish("q", [Outgoing(id="x", body=b"1"), Outgoing(id="x", body=b"1")])
    first, second = await receive(broker)
    assert first.identity != second.identity


async def test_names_differ_between_brokers(broker: MemoryBroker) -> None:
    """A store that outlives the process must not take a new message for an old one."""
    other = MemoryBroker()
    await other.open()
    for each in (broker, other):
        await each.publish("q", [Outgoing(id="x", body=b"1")])
    (mine,), (theirs,) = await receive(broker), await receive(other)
    assert mine.identity != theirs.identity
    await sources.settle(other, SUB, [Settlement(delivery=mine, verb=Verb.ACK)])
    await other.close()
    await other.open()
    assert await bodies(other) == [b"1"]
    await other.close()


async def test_a_refusal_names_the_limit(broker: MemoryBroker) -> None:
    (result,) = await broker.publish("q", [Outgoing(id="x", body=bytes(101))])
    assert isinstance(result.error, MessageTooLarge)
    assert str(result.error) == "the body has 101 bytes, the limit of the memory broker is 100"


async def test_the_callers_headers_stay_the_callers(broker: MemoryBroker) -> None:
    headers = {"a": "1"}
    await broker.publish("q", [Outgoing(id="x", body=b"", headers=headers)])
    headers["a"] = "2"
    (first,) = await receive(broker)
    assert first.headers == {"a": "1"}
    assert isinstance(first.headers, dict)
    first.headers["a"] = "3"
    await sources.settle(broker, SUB, [Settlement(delivery=first, verb=Verb.RELEASE)])
    (again,) = await receive(broker)
    assert again.headers == {"a": "1"}


async def test_a_wall_jump_moves_no_delay(broker: MemoryBroker, clock: FakeClock) -> None:
    await broker.publish("q", [Outgoing(id="x", body=b"1", delay_s=60)])
    clock.jump_wall(86_400)
    assert await bodies(broker) == []
    clock.jump_wall(-2 * 86_400)
    clock.advance(60)
    assert await bodies(broker) == [b"1"]


async def test_what_comes_back_goes_to_the_front(broker: MemoryBroker) -> None:
    await broker.publish("q", [Outgoing(id=str(i), body=b"%d" % i) for i in range(4)])
    first = await receive(broker, limit=2)
    await sources.settle(broker, SUB, [Settlement(delivery=d, verb=Verb.RELEASE) for d in first])
    assert await bodies(broker) == [b"0", b"1", b"2", b"3"]
    await broker.close()
    await broker.open()
    assert await bodies(broker) == [b"0", b"1", b"2", b"3"]


async def test_rejected_ones_are_kept_whole_with_their_reason(broker: MemoryBroker) -> None:
    await broker.publish("q", [Outgoing(id="x", body=b"bad", headers={"h": "1"})])
    (got,) = await receive(broker)
    await sources.settle(
        broker, SUB, [Settlement(delivery=got, verb=Verb.REJECT, reason="no such thing")]
    )
    (dead,) = broker.rejected
    assert (dead.queue, dead.body, dead.headers) == ("q", b"bad", {"h": "1"})
    assert (dead.reason, dead.identity, dead.count) == ("no such thing", got.identity, 1)
    (stats,) = await broker.stats()
    assert (stats.ready, stats.in_flight) == (0, 0)


async def test_stats_by_the_clock(broker: MemoryBroker, clock: FakeClock) -> None:
    assert isinstance(broker, Inspectable)
    await broker.publish("q", [Outgoing(id="a", body=b"a"), Outgoing(id="b", body=b"b", delay_s=9)])
    clock.advance(10)
    (stats,) = await broker.stats()
    assert (stats.ready, stats.delayed, stats.oldest_age_s) == (2, 0, 10.0)


async def test_a_closed_broker_says_so(broker: MemoryBroker) -> None:
    await broker.close()
    for call in (
        broker.publish("q", []),
        receive(broker),
        sources.settle(broker, SUB, []),
        broker.stats(),
    ):
        with pytest.raises(BrokerUnavailable, match="not open"):
            await call


async def test_reopening_at_once_still_ends_an_old_wait(broker: MemoryBroker) -> None:
    waiting = asyncio.create_task(receive(broker, wait=30))
    await asyncio.sleep(0)
    await broker.close()
    await broker.open()
    await broker.publish("q", [Outgoing(id="x", body=b"1")])
    assert await waiting == []
    assert await bodies(broker) == [b"1"]


async def test_a_limit_of_zero_takes_nothing(broker: MemoryBroker) -> None:
    await broker.publish("q", [Outgoing(id="x", body=b"1")])
    assert await receive(broker, limit=0, wait=30) == []


async def test_real_time_ends_a_delay_while_somebody_waits() -> None:
    broker = MemoryBroker()
    await broker.open()
    waiting = asyncio.create_task(receive(broker, wait=30))
    await asyncio.sleep(0)
    await broker.publish("q", [Outgoing(id="x", body=b"1", delay_s=0.05)])
    async with asyncio.timeout(10):
        (got,) = await waiting
    assert got.body == b"1"
    await broker.close()
