"""Redis: every entry that a consumer was given is in somebody's hands, or soon will be.

The visibility timeout is five minutes here: whatever comes, comes without it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from redis.asyncio import Redis

from ackbone.brokers.redis import RedisBroker
from ackbone.core.broker import Delivery, Settlement, Subscription, Verb
from ackbone.core.errors import BrokerUnavailable
from ackbone.core.ids import new_id
from ackbone.testing.harness import bodies, outgoing
from tests import sources
from tests.faults.waiting import PATIENCE_S
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.xdist_group("faults-redis")

LEASE_S = 300.0
TIMEOUT_S = 0.5
MakeBroker = Callable[..., Awaitable[RedisBroker]]


@pytest.fixture
async def make_broker(server: RedisServer) -> AsyncIterator[MakeBroker]:
    opened: list[RedisBroker] = []

    async def make(*, scan: bool | None = None) -> RedisBroker:
        broker = RedisBroker(server.url, lease_s=LEASE_S, timeout_s=TIMEOUT_S, scan=scan)
        await broker.open()
        opened.append(broker)
        return broker

    yield make
    for broker in opened:
        await broker.close()


@pytest.fixture
async def raw(server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(server.url)
    yield client
    await client.aclose()


@pytest.fixture
def sub() -> Subscription:
    name = f"entries-{new_id()[-12:]}"
    return Subscription(name=name, queue=name)


async def receive(broker: RedisBroker, sub: Subscription, n: int) -> list[Delivery]:
    """Exactly so many, in the order in which they come."""
    got: list[Delivery] = []
    end = time.monotonic() + PATIENCE_S
    while len(got) < n:
        assert time.monotonic() < end, f"{n} entries were due, {len(got)} came"
        got += await sources.receive(broker, sub, limit=min(500, n - len(got)), wait=1.0)
    return got


async def settle(
    broker: RedisBroker, sub: Subscription, batch: Sequence[Delivery], verb: Verb
) -> None:
    await sources.settle(broker, sub, [Settlement(delivery=d, verb=verb) for d in batch])


async def nothing_is_pending(raw: Redis, sub: Subscription) -> bool:
    return bool((await raw.xpending(sub.queue, sub.group))["pending"] == 0)


async def test_an_answer_that_nobody_saw(
    make_broker: MakeBroker, raw: Redis, sub: Subscription
) -> None:
    """A connection was given up, and the server answers it all the same, at any time later."""
    broker = await make_broker()
    batch = outgoing(10)
    await broker.publish(sub.queue, batch[:5])
    held = await receive(broker, sub, 5)
    (consumer,) = await raw.xinfo_consumers(sub.queue, sub.group)
    await broker.publish(sub.queue, batch[5:])
    await raw.xreadgroup(sub.group, consumer["name"], {sub.queue: ">"}, count=3)
    found = await receive(broker, sub, 5)
    assert sorted(bodies(found)) == [out.body for out in batch[5:]], "none twice, none missing"
    assert bodies(held) == [out.body for out in batch[:5]]


@pytest.mark.parametrize(("scan", "many"), [(None, 6_000), (True, 1_200)], ids=["auto", "scan"])
async def test_released_behind_many_that_are_held(
    make_broker: MakeBroker, sub: Subscription, scan: bool | None, many: int
) -> None:
    """However many entries others work on: what stands behind them is found."""
    busy, idle = await make_broker(scan=scan), await make_broker(scan=scan)
    batch = outgoing(many)
    for start in range(0, many, 500):
        await busy.publish(sub.queue, batch[start : start + 500])
    held = await receive(busy, sub, many)
    await settle(busy, sub, held[-1:], Verb.RELEASE)
    (found,) = await receive(idle, sub, 1)
    assert found.body == held[-1].body


async def test_what_could_not_be_released_is_released_later(
    server: RedisServer, make_broker: MakeBroker, sub: Subscription
) -> None:
    """The server was away when a message was given back: it comes again when that is there."""
    broker = await make_broker()
    await broker.publish(sub.queue, outgoing(1))
    (held,) = await receive(broker, sub, 1)
    await _away(server, sources.settle(broker, sub, [Settlement(delivery=held, verb=Verb.RELEASE)]))
    (found,) = await receive(broker, sub, 1)
    assert (found.body, found.count) == (held.body, 2)


async def test_what_could_not_be_acknowledged_is_acknowledged_later(
    server: RedisServer, make_broker: MakeBroker, raw: Redis, sub: Subscription
) -> None:
    broker = await make_broker()
    await broker.publish(sub.queue, outgoing(3))
    held = await receive(broker, sub, 3)
    await _away(
        server, sources.settle(broker, sub, [Settlement(delivery=d, verb=Verb.ACK) for d in held])
    )
    assert await sources.receive(broker, sub, limit=10, wait=0) == [], (
        "they are not handed out again"
    )
    assert await nothing_is_pending(raw, sub)


async def _away(server: RedisServer, call: Awaitable[object]) -> None:
    """The call meets no server."""
    server.kill()
    try:
        with pytest.raises(BrokerUnavailable):
            await call
    finally:
        server.start()


async def test_a_new_reader_begins_with_what_the_last_one_had(
    make_broker: MakeBroker, sub: Subscription
) -> None:
    """Order: what the last reader was given and did not settle comes before anything new."""
    old, new = await make_broker(), await make_broker()
    batch = outgoing(1_210)
    for start in range(0, len(batch), 500):
        await old.publish(sub.queue, batch[start : start + 500])
    (await old.subscribe(sub, room=1)).take_over()
    assert bodies(await receive(old, sub, 1_200)) == [out.body for out in batch[:1_200]]
    (await new.subscribe(sub, room=1)).take_over()
    assert bodies(await receive(new, sub, 1_210)) == [out.body for out in batch]


async def test_a_reader_that_was_replaced_and_reads_on(
    make_broker: MakeBroker, sub: Subscription
) -> None:
    """It stood still between the question who reads and its read: the new one gets those, too."""
    old, new = await make_broker(), await make_broker()
    batch = outgoing(30)
    await new.publish(sub.queue, batch[:10])
    (await new.subscribe(sub, room=1)).take_over()
    assert bodies(await receive(new, sub, 10)) == [out.body for out in batch[:10]]
    await new.publish(sub.queue, batch[10:20])
    late = await receive(old, sub, 10)
    await new.publish(sub.queue, batch[20:])
    assert bodies(await receive(new, sub, 20)) == [out.body for out in batch[10:]]
    await settle(old, sub, late, Verb.RELEASE)  # no longer its own: nothing happens
    assert await sources.receive(new, sub, limit=10, wait=0) == []


async def test_a_blocked_reader_sees_what_the_replaced_one_took(
    make_broker: MakeBroker, sub: Subscription
) -> None:
    old, new = await make_broker(), await make_broker()
    batch = outgoing(20)
    (await new.subscribe(sub, room=1)).take_over()
    assert await sources.receive(new, sub, limit=10, wait=0) == []
    await old.publish(sub.queue, batch[:10])
    await receive(old, sub, 10)
    waiting = asyncio.create_task(receive(new, sub, 20))
    await asyncio.sleep(0)
    await old.publish(sub.queue, batch[10:])
    assert bodies(await waiting) == [out.body for out in batch]


async def test_nothing_is_read_for_nobody(
    make_broker: MakeBroker, raw: Redis, sub: Subscription
) -> None:
    """To Redis a count of 0 means everything."""
    broker = await make_broker()
    await broker.publish(sub.queue, outgoing(10))
    await receive(broker, sub, 1)
    assert await sources.receive(broker, sub, limit=0, wait=0) == []
    assert (await raw.xpending(sub.queue, sub.group))["pending"] == 1
