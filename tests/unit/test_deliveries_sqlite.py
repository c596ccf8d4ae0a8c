"""Replies in the SQLite file: what an older version wrote, a clock that is set, idle senders."""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from ackbone.core.outbound.delivery import (
    Again,
    Limit,
    New,
    Outbound,
    Sent,
    Settled,
    Taken,
    unlimited,
)
from ackbone.core.outbound.send_order import AHEAD_US
from ackbone.core.store import Worker
from ackbone.store.sqlite.deliveries import SqliteDeliveries
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from ackbone.testing import FakeClock

DAY_S = 86_400
UNTIL_GIVEN_UP_S = 130
"""A call without an answer counts no longer."""


def one_in_ten_seconds(reply: Outbound) -> Sequence[Limit]:
    return [Limit(reply.recipient, 1, 10.0)]


class Counter:
    """A file with a queue of replies, and one who sends them."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.store = SqliteStore(path, clock=self.clock)
        self.queue = SqliteDeliveries(self.store)
        self.limits = {"c": unlimited}
        self.worker = Worker(worker_id=0)

    async def put(self, *ids: str, expires_s: float | None = None) -> None:
        await self.queue.put(
            [
                New(
                    id=each,
                    tenant_id="acme",
                    channel="c",
                    recipient="ann",
                    content="x",
                    conversation=each,
                    expires_s=expires_s,
                )
                for each in ids
            ]
        )

    async def take(self) -> Taken:
        return await self.queue.take(self.limits, limit=10, worker=self.worker)

    async def ids(self) -> list[str]:
        return [reply.id for reply in (await self.take()).replies]

    async def settle(self, reply: Outbound, result: Sent | Again) -> None:
        settled = Settled(reply=reply, result=result)
        await self.queue.settle(self.limits, [settled], worker=self.worker)

    def commits(self) -> int:
        """Durable ones."""
        return int(
            self.store.file.read_sync(
                lambda conn: conn.execute("SELECT commits FROM witness").fetchone()[0]
            )
        )


@pytest.fixture
async def counter(home: Path) -> AsyncIterator[Counter]:
    ensure_schema(home / "ackbone.db")
    found = Counter(home / "ackbone.db")
    await found.store.open()
    found.worker = await found.store.register("sender")
    yield found
    await found.store.close()


async def test_a_look_at_nothing_costs_no_commit(counter: Counter) -> None:
    counter.limits = {"c": one_in_ten_seconds}
    before = counter.commits()
    assert (await counter.take()) == Taken((), None)
    assert await counter.queue.recover(worker=counter.worker) == 0
    assert counter.commits() == before
    await counter.put("a", "b")
    assert await counter.ids() == ["a"]
    before = counter.commits()
    for _ in range(3):
        taken = await counter.take()
        assert not taken.replies
        assert taken.next_s == 10.0 - AHEAD_US / 1e6
    assert counter.commits() == before, "b waits for its place, and stands there already"


async def test_a_channel_at_its_limit_costs_no_commit(counter: Counter) -> None:
    counter.limits = {"c": lambda reply: [Limit("bot", 1, 10.0, whole_channel=True)]}
    await counter.put("a", "b")
    assert await counter.ids() == ["a"]
    before = counter.commits()
    assert (await counter.take()).next_s == 10.0 - AHEAD_US / 1e6
    assert counter.commits() == before


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
async def test_waits_and_limits_move_with_the_clock(counter: Counter, jump_s: float) -> None:
    counter.limits = {"c": one_in_ten_seconds}
    await counter.put("a", "b")
    (reply,) = (await counter.take()).replies
    await counter.settle(reply, Sent())
    await counter.put("short", expires_s=60.0)
    counter.clock.jump_wall(jump_s)
    assert await counter.ids() == []
    counter.clock.advance(9)
    assert await counter.ids() == []
    counter.clock.advance(1)
    assert await counter.ids() == ["b"]
    counter.clock.advance(49)
    assert await counter.ids() == [], "b's call is under way"
    counter.clock.advance(UNTIL_GIVEN_UP_S)
    await counter.ids()
    found = counter.store.file.read_sync(
        lambda conn: conn.execute("SELECT status FROM deliveries WHERE id = 'short'").fetchone()
    )
    assert found == ("failed",), "its time was over as it would have been"


async def test_a_sender_that_died_before_the_clock_was_set_blocks_nobody(counter: Counter) -> None:
    counter.limits = {"c": one_in_ten_seconds}
    await counter.put("a")
    dead = await counter.store.register("dead")
    await counter.queue.take(counter.limits, limit=1, worker=dead)
    await counter.store.leave(dead)
    counter.clock.jump_wall(-DAY_S)
    await counter.put("b")  # the clock's move is noticed
    assert await counter.queue.recover(worker=counter.worker) == 1
    assert await counter.ids() == []
    counter.clock.advance(10)
    assert await counter.ids() == ["a"]


async def test_recovery_reads_only_windows_that_count(counter: Counter) -> None:
    """There may be one for each chat of a year, and this is the only writer."""
    await counter.put("a")
    dead = await counter.store.register("dead")
    await counter.queue.take(counter.limits, limit=1, worker=dead)
    await counter.store.leave(dead)

    def plant(conn: sqlite3.Connection) -> None:
        now = counter.store.clock.now_us()
        conn.execute("INSERT INTO send_windows (key, state, ends_at) VALUES ('k', '[]', ?)", (now,))

    await counter.store.file.write(plant)
    assert await counter.queue.recover(worker=counter.worker) == 1


async def test_a_head_that_nobody_follows_costs_no_commit(counter: Counter) -> None:
    await counter.put("a", "b")
    (head, _) = (await counter.take()).replies
    before = counter.commits()
    found = await counter.queue.follow(head, lambda _: True, limit=10, worker=counter.worker)
    assert not found
    assert counter.commits() == before
