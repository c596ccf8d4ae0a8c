"""The Redis server is killed, stands still, or cuts connections: nothing is lost, all goes on."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TypeVar

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis

from ackbone.app import App
from ackbone.brokers.redis import RedisBroker
from ackbone.core.broker import Outgoing, Settlement, Subscription, Verb
from ackbone.core.errors import BrokerError, PublishUnknown
from ackbone.testing.harness import outgoing
from tests import sources
from tests.faults.checker import Sent
from tests.faults.conftest import VISIBILITY_S, MakeFleet
from tests.faults.harness import Fleet
from tests.faults.waiting import PATIENCE_S, until
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.xdist_group("faults-redis")
T = TypeVar("T")

PUBLISHERS = 100
APPS = 10
"""Those of one app share its connection, and its batches."""
RESUME_S = 5.0
"""From the server's return to the next accepted message."""
AGAIN_S = 0.02


@pytest.fixture
def broker() -> str:
    return "redis"


class Publishers:
    """Many that send at once. Whatever is not a clear yes is sent again under the same id."""

    def __init__(self, fleet: Fleet, total: int) -> None:
        self.fleet = fleet
        self.total = total
        self.refused = 0
        self.accepted_at: list[float] = []
        self._marks: dict[int, asyncio.Event] = {}

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            apps = [await stack.enter_async_context(self.fleet.app()) for _ in range(APPS)]
            share = self.total // PUBLISHERS
            each = (self._one(apps[n % APPS], n, share) for n in range(PUBLISHERS))
            await asyncio.gather(*each)

    async def _one(self, app: App, publisher: int, messages: int) -> None:
        for n in range(messages):
            message_id = f"m-{publisher}-{n}"
            while not await self._accepted(app, message_id):
                self.refused += 1
                await asyncio.sleep(AGAIN_S)
            self.fleet.sent.append(Sent(id=message_id))
            self.accepted_at.append(time.monotonic())
            if len(self.accepted_at) in self._marks:
                self._marks[len(self.accepted_at)].set()
            await asyncio.sleep(AGAIN_S)

    async def _accepted(self, app: App, message_id: str) -> bool:
        with suppress(BrokerError):
            await app.send("work", {"seconds": 0.01}, id=message_id)
            return True
        return False

    async def reach(self, share: float) -> None:
        """Until so many of the messages are accepted."""
        mark = int(self.total * share)
        self._marks[mark] = asyncio.Event()
        async with asyncio.timeout(PATIENCE_S):
            while len(self.accepted_at) < mark:
                await self._marks[mark].wait()

    def was_refused(self, before: int) -> bool:
        return self.refused > before

    def pause_after(self, moment: float) -> float:
        return min(at for at in self.accepted_at if at > moment) - moment


async def test_server_killed_under_load(
    make_fleet: MakeFleet, redis_server: RedisServer, soak: bool
) -> None:
    """Killed at a third and at half of the messages, and started again."""
    fleet = make_fleet(WORKER__SLOTS=50)
    await asyncio.to_thread(fleet.start, 2)
    publishers = Publishers(fleet, 10_000 if soak else 2_000)
    sending = asyncio.create_task(publishers.run())
    back: list[float] = []
    for share in (1 / 3, 1 / 2):
        await publishers.reach(share)
        refused = publishers.refused
        redis_server.kill()  # here and now, before anybody sends another one
        await until(partial(publishers.was_refused, refused), "someone is refused")
        await asyncio.to_thread(redis_server.start)
        back.append(time.monotonic())
    await sending
    pauses = [publishers.pause_after(moment) for moment in back]
    await asyncio.to_thread(fleet.wait_until_final)
    report = fleet.check(replies_per_run=1)
    print(f"{publishers.refused} tries refused; accepted again after {pauses} s")
    assert report.ends == {"task.succeeded": publishers.total}
    assert max(pauses) < RESUME_S


class Caller:
    """Makes one call after the other, and notes how long each took."""

    def __init__(self) -> None:
        self.slowest_s: dict[str, float] = {}
        self.failed = 0

    async def call(self, name: str, work: Awaitable[T]) -> T | None:
        begun = time.monotonic()
        try:
            return await work
        except BrokerError:
            self.failed += 1
            await asyncio.sleep(AGAIN_S)
            return None
        finally:
            took = time.monotonic() - begun
            self.slowest_s[name] = max(took, self.slowest_s.get(name, 0.0))


async def test_server_stands_still(redis_server: RedisServer, soak: bool) -> None:
    """SIGSTOP: each call ends in time, no false yes; SIGCONT: all of them go on."""
    timeout_s, still_s, receive_s = 1.0, 30.0 if soak else 6.0, 0.5
    broker = RedisBroker(redis_server.url, timeout_s=timeout_s)
    await broker.open()
    sub = Subscription(name="still", queue="still")
    caller = Caller()
    yes: set[str] = set()
    perhaps: set[str] = set()
    settled: list[str] = []
    end = asyncio.Event()

    async def publish() -> None:
        while not end.is_set():
            batch = outgoing(3)
            perhaps.update(out.id for out in batch)
            results = await caller.call("publish", _published(broker, sub, batch))
            yes.update(result for result in results or ())

    async def consume() -> None:
        while not end.is_set():
            got = await caller.call(
                "receive", sources.receive(broker, sub, limit=20, wait=receive_s)
            )
            acks = [Settlement(delivery=delivery, verb=Verb.ACK) for delivery in got or ()]
            if acks:
                await caller.call("settle", sources.settle(broker, sub, acks))
            settled.extend(str(ack.delivery.identity) for ack in acks)

    async def ask_how_it_is() -> None:
        while not end.is_set():
            await caller.call("health", broker.health())
            await asyncio.sleep(AGAIN_S)

    calls = [asyncio.create_task(work()) for work in (*[publish] * 5, consume, ask_how_it_is)]
    try:
        await until(lambda: len(settled) > 50, "messages flow")
        redis_server.pause()
        await asyncio.sleep(still_s)  # the fault itself
        before, failed = len(yes), caller.failed
        assert not (await broker.health()).ok
        redis_server.go_on()
        await until(lambda: len(yes) > before + 50, "messages are accepted again")
        await until(lambda: len(settled) > before + 50, "messages flow again")
        end.set()
        await asyncio.gather(*calls)
        while got := await sources.receive(broker, sub, limit=500, wait=1.0):
            await sources.settle(broker, sub, [Settlement(delivery=d, verb=Verb.ACK) for d in got])
            settled.extend(str(delivery.identity) for delivery in got)
    finally:
        end.set()
        await asyncio.gather(*calls, return_exceptions=True)
        await broker.close()
    slowest = {name: round(took, 2) for name, took in caller.slowest_s.items()}
    print(f"{failed} calls failed, the slowest: {slowest}; {len(perhaps - yes)} sends unknown")
    assert failed > 0
    assert yes <= set(settled), f"{len(yes - set(settled))} were reported durable and are not there"
    assert set(settled) <= perhaps, "messages that nobody sent"
    # Settling asks twice; a slow machine gets as much again.
    limits = {"publish": timeout_s, "settle": 2 * timeout_s, "health": timeout_s}
    limits["receive"] = receive_s + timeout_s
    assert all(took < 3 * limits[name] for name, took in slowest.items()), slowest


async def _published(broker: RedisBroker, sub: Subscription, batch: list[Outgoing]) -> list[str]:
    with suppress(PublishUnknown):
        return [result.id for result in await broker.publish(sub.queue, batch) if result.ok]
    return []


def test_workers_outlast_a_server_that_stands_still(
    make_fleet: MakeFleet, redis_server: RedisServer, soak: bool
) -> None:
    """They go on when it does; told to stop meanwhile, one does not wait for it."""
    url = f"{redis_server.url}?visibility_timeout_s={VISIBILITY_S}&timeout_s=1"
    fleet = make_fleet(WORKER__SLOTS=20, BROKER=url)
    leaving, staying = fleet.start(2)
    work = {"type": "work", "payload": {"seconds": 0.1}}
    fleet.send([work] * 400)
    fleet.wait_for(partial(fleet.has_finished, 50), "messages flow")
    redis_server.pause()
    try:
        assert fleet.terminate(leaving) == 0, "it ends in order, without the server"
        time.sleep(30.0 if soak else 6.0)  # the fault itself
    finally:
        redis_server.go_on()
    fleet.send([work] * 100)
    fleet.wait_until_final()
    fleet.check(replies_per_run=1)
    assert staying.poll() is None


def is_settled(server: RedisServer) -> bool:
    with SyncRedis.from_url(server.url) as client:
        return bool(client.xpending("default", "cg:workers")["pending"] == 0)


async def test_connections_are_cut_under_load(
    make_fleet: MakeFleet, redis_server: RedisServer, soak: bool
) -> None:
    """The worker lives: nothing waits for the visibility timeout, which is longer than the test."""
    url = f"{redis_server.url}?visibility_timeout_s=3600"
    fleet = make_fleet(WORKER__SLOTS=50, BROKER=url)
    await asyncio.to_thread(fleet.start, 2)
    publishers = Publishers(fleet, 10_000 if soak else 3_000)
    sending = asyncio.create_task(publishers.run())
    await publishers.reach(0.05)
    cut = 0
    async with Redis.from_url(redis_server.url) as raw, asyncio.timeout(PATIENCE_S):
        while not fleet.has_finished(publishers.total / 2):
            cut += await raw.client_kill_filter(skipme=True, _type="normal")
            await asyncio.sleep(0.1 * fleet.random.random())
    await sending
    await asyncio.to_thread(fleet.wait_until_final)
    print(f"{cut} connections cut, {publishers.refused} tries refused")
    await until(partial(is_settled, redis_server), "the server knows that all of it is done")
    report = fleet.check(replies_per_run=1)
    assert cut > 20, "the connections were hardly cut"
    assert report.ends == {"task.succeeded": publishers.total}
