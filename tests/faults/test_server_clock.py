"""Somebody sets the clock of the PostgreSQL server, forwards or back, while workers run.

The server runs under libfaketime; the workers, the broker and this test have the machine's clock.
Nobody who lives is declared dead, a killed worker is taken over within its lease, nothing expires
early, and what was due in seconds is due in seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet
from tests.servers.faketime import ClockFile
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("faults-postgres")

MINUTE, HOUR, DAY = 60, 3600, 86_400
LEASE_S = 8.0
"""Long enough for a machine that many share to be no death."""
RETRY_S = 5.0
FAR_S = 7 * DAY


@pytest.fixture
def broker() -> str:
    return "redis+postgres"


@pytest.fixture
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.use_clock()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def clock(postgres_server: PostgresServer) -> ClockFile:
    assert postgres_server.clock is not None
    return postgres_server.clock


def make(make_fleet: MakeFleet, **settings: object) -> Fleet:
    return make_fleet(
        WORKER__LEASE_S=LEASE_S,
        WORKER__SLOTS=25,
        TASKS__RETRY_DELAYS_S=f"[{RETRY_S}]",
        **settings,
    )


def send(fleet: Fleet, *messages: dict[str, Any]) -> None:
    """With the options of `App.send`, which `Fleet.send` does not know."""

    async def sending() -> None:
        async with fleet.app() as app:
            for message in messages:
                await app.send(message.pop("type"), message.pop("payload", {}), **message)

    asyncio.run(sending())


def due_in(fleet: Fleet) -> float:
    """How long, by the server's clock, the message has to wait that is due in a week."""
    return float(
        fleet.one(
            "SELECT extract(epoch FROM due_at - clock_timestamp()) FROM outbox"
            " WHERE message_id = 'far'"
        )
    )


def follows(fleet: Fleet, seconds: int) -> bool:
    """The waiting times were moved, and by that."""
    moved = fleet.one("SELECT (state ->> 'moved_us')::bigint FROM roles WHERE role = 'clock'")
    return moved is not None and abs(moved / 1e6 - seconds) < 1.5


def test_the_servers_clock_is_set(
    make_fleet: MakeFleet, clock: ClockFile, soak: bool, tmp_path: Any
) -> None:
    fleet = make(make_fleet)
    go = tmp_path / "go"
    late = [f"late-{n}" for n in range(20)]
    held = {"type": "late", "payload": {"until": str(go)}}
    send(fleet, *({**held, "id": message_id} for message_id in late))
    send(fleet, {"type": "work", "id": "far", "delay_s": float(FAR_S)})
    fleet.start(2)
    fleet.wait_for(lambda: fleet.are_running(late), "all of them run")
    jumps = [MINUTE, -MINUTE, HOUR, -HOUR, DAY, -DAY]
    if not soak:  # as large, one after the other without the way back
        jumps = [MINUTE, -HOUR, DAY]
    ahead, begun = 0, time.monotonic()
    for n, jump in enumerate(jumps):
        before = due_in(fleet) + time.monotonic() - begun
        send(
            fleet,
            {"type": "work", "id": f"retried-{n}", "payload": {"fail": 1}, "ttl_s": 600.0},
            *({"type": "work", "payload": {"seconds": 0.2}} for _ in range(20)),
        )
        fleet.wait_for(partial(fleet.events, "task.retried", f"retried-{n}"), "it is to be retried")
        since = time.monotonic()
        ahead += jump
        clock.set(ahead)
        fleet.wait_for(partial(follows, fleet, ahead), f"what waits follows by {jump} s")
        assert abs(due_in(fleet) + time.monotonic() - begun - before) < 2
        fleet.wait_for(lambda n=n: fleet.status(f"retried-{n}") == "succeeded", "the retry")  # type: ignore[misc]
        assert RETRY_S - 2 < time.monotonic() - since < RETRY_S + 10, "not when it was due"
    assert fleet.are_running(late)
    victim = fleet.process(fleet.busy()[0].pid)
    number = fleet.kill(victim)
    killed, ahead = time.monotonic(), ahead - 11 * MINUTE
    clock.set(ahead)
    # While the clock is set back, nothing shows that a worker outlived it: its death is no crash.
    dead = "SELECT worker_id FROM workers WHERE state IN ('dead', 'left')"
    fleet.wait_for(lambda: fleet.rows(dead), "the killed one is declared dead")
    taken_s = time.monotonic() - killed
    print(f"taken over after {taken_s:.1f} s, lease {LEASE_S:.0f} s")
    assert taken_s < LEASE_S + 3
    go.touch()
    for message_id in late:
        fleet.wait_for(lambda m=message_id: fleet.status(m) == "succeeded", message_id)  # type: ignore[misc]
    assert fleet.rows(dead) == [(number,)], "somebody died who lived"
    assert fleet.events("task.expired") == 0
    survived = "SELECT count(*) FROM queue_executions WHERE message_id LIKE 'late%' AND attempt > 1"
    assert fleet.one(survived) <= fleet.one(
        "SELECT count(*) FROM event_log WHERE event_type = 'task.reclaimed'"
    )


@pytest.mark.parametrize(
    ("skew", "stream"),
    [(2 * MINUTE, "elsewhere"), (2 * MINUTE, "default"), (-2 * MINUTE, "elsewhere")],
    ids=["ahead", "ahead, of tasks", "behind"],
)
def test_a_time_to_live_goes_by_one_clock(
    make_fleet: MakeFleet, clock: ClockFile, skew: int, stream: str
) -> None:
    """The store's server is two minutes ahead of the broker's, or behind it. Entries of tasks say
    when they expire, others for how long they live."""
    clock.set(skew)
    fleet = make(make_fleet, DEFAULT_QUEUE=stream, TASKS__STREAM=stream)
    send(fleet, {"type": "work", "id": "short", "ttl_s": 0.5})
    time.sleep(1.0)  # its time to live passes
    send(fleet, {"type": "work", "id": "long", "ttl_s": 60.0})
    fleet.start(1)
    fleet.wait_for(lambda: fleet.status("long") == "succeeded", "it has time left")
    fleet.wait_for(lambda: fleet.status("short") == "expired", "its time was over")
