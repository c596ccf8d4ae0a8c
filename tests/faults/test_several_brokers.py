"""One program on three brokers: workers are killed, one broker is away, the others never pause."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ackbone.core.errors import BrokerError
from ackbone.core.events import CLAIMED, SUCCEEDED
from tests.conftest import ALLOWANCE
from tests.faults.checker import Sent
from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet
from tests.faults.history import History
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.xdist_group("rabbitmq")

TARGET = f"{Path(__file__).with_name('several_app.py')}:app"
BROKERS = {"near": "default", "far": "events", "beside": "commands"}
"""Queues on SQLite, Redis and RabbitMQ. Each message runs on all of them, from any of them on."""
LIVING = ("near", "beside")
LONGEST_GAP_S = 3.0
"""Between two runs on a queue whose broker is there, and gets messages all the time."""
NINE_OF_TEN_S = 1.0
"""Nine of ten messages to such a queue end within this time, kills included."""
AGAIN_S = 0.02


def settings(redis: RedisServer, rabbitmq: RabbitServer) -> dict[str, object]:
    queues = {name: {"broker": broker, "ordered": False} for name, broker in BROKERS.items()}
    return {
        "BROKERS": json.dumps({"events": redis.url, "commands": rabbitmq.url}),
        "QUEUES": json.dumps(queues),
        "WORKER__SLOTS": 35,
        "SEND_TIMEOUT_S": 2,
    }


async def feed(fleet: Fleet, total: int, seconds: float) -> dict[str, int]:
    """Send to each queue at a steady pace. What was not clearly accepted is sent again, under the
    same id. Returns when each was accepted."""
    accepted_us: dict[str, int] = {}

    async def to(*way: str) -> None:
        for n in range(total // len(way)):
            pace = asyncio.create_task(asyncio.sleep(seconds * len(way) / total))
            root = f"{way[0]}-{n}"
            message = {"root": root, "then": way[1:], "seconds": 0.2 * fleet.random.random()}
            names = [f"{root}-{left}" for left in range(len(way))]
            while not await accepted(message, way[0], names[-1]):  # noqa: ASYNC110 - tries again
                await asyncio.sleep(AGAIN_S)
            accepted_us[names[-1]] = fleet.now_us()
            fleet.sent += [
                Sent(id=name, subscription=queue)
                for name, queue in zip(reversed(names), way, strict=True)
            ]
            await pace

    async def accepted(message: dict[str, Any], queue: str, name: str) -> bool:
        with suppress(BrokerError):
            await app.send("step", message, queue=queue, id=name)
            return True
        return False

    near, far, beside = BROKERS
    async with fleet.app() as app:
        await asyncio.gather(to(near, far, beside), to(far, beside, near), to(beside, near, far))
    return accepted_us


def make_trouble(
    fleet: Fleet, redis: RedisServer, total: int, kills: int, away_s: float, *, hangs: bool
) -> tuple[int, int]:
    """A third of the kills before the broker is away, a third meanwhile, a third afterwards.

    `hangs`: it is not killed, but stands still, and every call to it waits for its deadline.

    Returns when it went and when it came back.
    """

    def kill() -> None:
        busy = fleet.wait_for(fleet.busy, "a worker has running tasks")
        fleet.kill(fleet.process(fleet.random.choice(busy).pid))
        fleet.start(target=TARGET)

    def kill_after(share: float) -> None:
        fleet.wait_for(partial(fleet.has_finished, share * total), f"{share:.0%} are finished")
        kill()

    third = kills // 3
    for n in range(third):
        kill_after(0.02 + 0.1 * n / third)
    (redis.pause if hangs else redis.kill)()
    gone, gone_us = time.monotonic(), fleet.now_us()
    for n in range(third + 1):
        moment = gone + away_s * (n + 1) / (third + 1)
        fleet.wait_for(partial(has_come, moment), "the next moment")
        if n < third:
            kill()
    back_us = fleet.now_us()
    (redis.go_on if hangs else redis.start)()
    for n in range(kills - 2 * third):
        kill_after(0.7 + 0.2 * n / third)
    return gone_us, back_us


def has_come(moment: float) -> bool:
    return time.monotonic() > moment


def longest_gap_s(history: History, queue: str, begin_us: int, end_us: int) -> float:
    """The longest time without the start of a run on this queue."""
    claims = (e.created_at_us for e in history.of_type(CLAIMED) if e.subscription == queue)
    moments = [begin_us, *(at for at in claims if begin_us < at < end_us), end_us]
    return max(after - before for before, after in pairwise(moments)) / 1e6


def seconds_taken(
    history: History, queue: str, accepted_us: dict[str, int], begin_us: int, end_us: int
) -> list[float]:
    """From the send to the end of each message that was sent to this queue meanwhile, sorted."""
    return sorted(
        (e.created_at_us - accepted_us[e.task_id]) / 1e6
        for e in history.of_type(SUCCEEDED)
        if e.subscription == queue and begin_us < accepted_us.get(e.task_id, 0) < end_us
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.soak)])
async def test_a_broker_that_is_away_stops_its_own_queues_alone(
    make_fleet: MakeFleet,
    redis_server: RedisServer,
    rabbitmq: RabbitServer,
    soak: bool,
    hangs: bool,
) -> None:
    total, kills, away_s = (5_001, 15, 20.0) if soak else (600, 3, 6.0)
    rabbitmq.forget("beside")
    fleet = make_fleet(**settings(redis_server, rabbitmq))
    await asyncio.to_thread(fleet.start, 2, target=TARGET)
    sending = asyncio.create_task(feed(fleet, total, seconds=2.5 * away_s))
    runs = total * len(BROKERS)
    gone_us, back_us = await asyncio.to_thread(
        partial(make_trouble, fleet, redis_server, runs, kills, away_s, hangs=hangs)
    )
    accepted_us = await sending
    await asyncio.to_thread(fleet.wait_until_final)
    report = fleet.check(replies_per_run=0)
    assert report.ends == {"task.succeeded": runs}
    assert report.kills == kills

    history = History(fleet.database)
    print(f"redis was away for {(back_us - gone_us) / 1e6:.1f} s")
    for queue in LIVING:
        gap = longest_gap_s(history, queue, gone_us, back_us)
        took = seconds_taken(history, queue, accepted_us, gone_us, back_us)
        ninth = took[len(took) * 9 // 10]
        print(
            f"{queue}: longest time without a run {gap:.2f} s; {len(took)} messages sent meanwhile"
            f" ended after {ninth:.2f} s (p90), {took[-1]:.2f} s (max)"
        )
        assert gap < LONGEST_GAP_S
        assert ninth < NINE_OF_TEN_S * ALLOWANCE
    assert longest_gap_s(history, "far", gone_us, back_us) > away_s / 2, "the broker was away"
