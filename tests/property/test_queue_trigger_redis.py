"""Properties 15 to 17 with the dedup memory in a real Redis, shared by two triggers.

Each trigger has a store of its own, as on two machines: what one knows of the other is in Redis.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from ackbone import RedisIdempotencyStore
from ackbone.testing import FakeClock
from tests.property import trigger_lab
from tests.property.trigger_lab import World, message, words
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.xdist_group("faults-redis")

SLACK_S = 20
"""Redis' time goes on while an example runs."""
_running: list[RedisServer] = []
"""The one server: Hypothesis keeps a fixture from changing between examples, not this."""


@pytest.fixture(scope="module", autouse=True)
def running_server() -> Iterator[None]:
    server = RedisServer()
    server.start()
    _running.append(server)
    yield
    _running.remove(server)
    server.remove()


@asynccontextmanager
async def memory() -> AsyncIterator[Any]:
    """An empty Redis, and a client for it."""
    async with Redis.from_url(_running[-1].url) as client:
        await client.flushall()
        yield client


def run(check: Callable[[], Awaitable[None]]) -> None:
    async def example() -> None:
        try:
            await check()
        finally:
            while trigger_lab._worlds:
                await trigger_lab._worlds.pop().close()

    asyncio.run(example())


async def grow_older(client: Any, seconds: int) -> None:
    """As if so much time had passed on the server: every key has that much less to live."""
    async for key in client.scan_iter():
        left_ms = await client.pttl(key)
        if left_ms > seconds * 1000:
            await client.pexpire(key, left_ms - seconds * 1000)
        elif left_ms >= 0:
            await client.delete(key)


batches = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=12)
"""Which of the two triggers, and which key."""


@given(batch=batches, concurrency=st.integers(1, 4), fails=st.integers(0, 1))
def test_property_15_one_run_for_each_key(
    batch: list[tuple[bool, int]], concurrency: int, fails: int
) -> None:
    """Feature: triggers-queue, Property 15: one run for each key, whichever trigger gets it."""

    async def check() -> None:
        async with memory() as client:
            worlds = await _two(client, batch, concurrency, fails)
            statuses: Counter[str] = Counter()
            for world in worlds:
                statuses.update(s for (s,) in world.rows("SELECT status FROM queue_executions"))
            keys = {key for _, key in batch}
            assert statuses["succeeded"] == len(keys)
            assert statuses["duplicate"] == len(batch) - len(keys)
            finished = sum(len(world.runtime.finished.seen) for world in worlds)
            assert finished == len(keys)
            for first, world in enumerate(worlds):
                mine = sorted(f"m{n}" for n, (second, _) in enumerate(batch) if second == first)
                assert sorted(world.adapter.get_acked()) == mine
                assert world.adapter.get_dlq() == []
            left = [key async for key in client.scan_iter(match="idempotency:*")]
            assert len(left) == len(keys)

    run(check)


async def _two(
    client: Any, batch: list[tuple[bool, int]], concurrency: int, fails: int = 0, **config: Any
) -> list[World]:
    """Two triggers that have settled their part of the messages."""
    worlds = [
        World(
            keys=RedisIdempotencyStore(client),
            concurrency=concurrency,
            retry_backoff_base=0.001,
            **config,
        )
        for _ in range(2)
    ]
    worlds[0].runtime.fail(RuntimeError("the key is free again"), times=fails)
    for n, (second, key) in enumerate(batch):
        worlds[second].put(message(f"m{n}", b"1", {"x-dedup-key": f"key-{key}"}))
    for world in worlds:
        await world.trigger.start()
    for first, world in enumerate(worlds):
        await world.settled(sum(1 for second, _ in batch if second == first))
    for world in worlds:
        await world.trigger.stop()
    return worlds


@given(window=st.integers(3 * SLACK_S, 7200), key=words, rounds=st.integers(1, 3))
def test_property_16_window(window: int, key: str, rounds: int) -> None:
    """Feature: triggers-queue, Property 16: a key is held for its window, and free after it."""

    async def check() -> None:
        async with memory() as client:
            clock = FakeClock()
            first, second = (
                World(keys=RedisIdempotencyStore(client), clock=clock, idempotency_window=window)
                for _ in range(2)
            )
            async with first, second:
                for n in range(rounds):
                    first.put(message(f"first-{n}", headers={"x-dedup-key": key}))
                    await first.settled(n + 1)
                    second.put(message(f"at-once-{n}", headers={"x-dedup-key": key}))
                    await second.settled(2 * n + 1)
                    clock.advance(window - SLACK_S)
                    await grow_older(client, window - SLACK_S)
                    second.put(message(f"in-time-{n}", headers={"x-dedup-key": key}))
                    await second.settled(2 * n + 2)
                    clock.advance(SLACK_S + 1)
                    await grow_older(client, SLACK_S + 1)
            assert first.runs() == [f"first-{n}" for n in range(rounds)]
            assert second.runs() == []
            assert len(second.adapter.get_acked()) == 2 * rounds

    run(check)


@given(batch=batches, concurrency=st.integers(1, 4), enable_dedup=st.booleans())
def test_property_17_dedup_count(
    batch: list[tuple[bool, int]], concurrency: int, enable_dedup: bool
) -> None:
    """Feature: triggers-queue, Property 17: every deduplicated message is counted, exactly."""

    async def check() -> None:
        async with memory() as client:
            worlds = await _two(client, batch, concurrency, enable_dedup=enable_dedup)
            hits = sum(
                world.trigger.metrics.read("queue_dedup_hits_total", queue="orders")
                for world in worlds
            )
            different = len({key for _, key in batch}) if enable_dedup else len(batch)
            assert hits == len(batch) - different
            assert sum(len(world.runs()) for world in worlds) == different
            for world in worlds:
                assert world.trigger.metrics.read("queue_dedup_unavailable_total") == 0

    run(check)
