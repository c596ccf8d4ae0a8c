"""SIGKILL at random moments: nothing is lost, nothing is committed twice, work comes back soon."""

from collections.abc import Iterator
from functools import partial

import pytest

from ackbone.core.events import CLAIMED
from tests.conftest import ALLOWANCE
from tests.faults.conftest import MakeFleet, on_each_broker, on_every_broker
from tests.faults.harness import LEASE_S, Fleet
from tests.faults.history import History

pytestmark = pytest.mark.xdist_group("faults-1")

RECLAIM_S = {"embedded": 2.0, "redis": 2.0, "rabbitmq": 2.0}
RECLAIM_S |= dict.fromkeys(("redis+postgres", "rabbitmq+postgres", "postgres"), 2.0 + 2.0)
"""By the store: a file's lock is free at once, a server waits for the lease, too."""
LONGEST_RUN_S = 2.0


def kill_at_random(fleet: Fleet, kills: int, total: int, *, last: float = 0.75) -> None:
    """Spread over the first part of the work, up to `last`; nine of ten victims are busy ones.

    What is left then must outlast this process, which may be the slow one on a busy machine.
    """
    moments = sorted(fleet.random.uniform(0.01, last) * total for _ in range(kills))
    for n, moment in enumerate(moments):
        fleet.wait_for(partial(fleet.has_finished, moment), f"{moment:.0f} messages are finished")
        if n % 10 == 9:
            victim = fleet.random.choice(fleet.processes)
        else:
            busy = fleet.wait_for(fleet.busy, "a worker has running tasks")
            victim = fleet.process(fleet.random.choice(busy).pid)
        fleet.kill(victim)
        fleet.start()


@on_every_broker()
def test_kill(make_fleet: MakeFleet, broker: str, soak: bool) -> None:
    counts = {"embedded": (3_000, 15), "redis+postgres": (2_000, 10)}
    total, kills = (10_000, 50) if soak else counts.get(broker, (1_000, 5))
    fleet = make_fleet(WORKER__SLOTS=35)
    fleet.send(
        {
            "type": "work",
            "payload": {"seconds": 0.2 + (LONGEST_RUN_S - 0.2) * fleet.random.random() ** 3},
            "idempotency_key": f"key-{n}",
        }
        for n in range(total)
    )
    fleet.start(2)
    kill_at_random(fleet, kills, total)
    fleet.wait_until_final()
    report = fleet.check(replies_per_run=1, reclaim_limit_s=RECLAIM_S[broker] * ALLOWANCE)
    assert report.kills == kills
    assert report.busy_kills >= 0.85 * kills
    assert report.ends["task.succeeded"] == total
    print_seconds(seconds_to_the_next_run(fleet))


@on_each_broker
def test_work_runs_again_at_the_speed_of_the_lease(
    make_fleet: MakeFleet, broker: str, soak: bool
) -> None:
    """The broker would give the copies of a dead worker to others after 300 s only."""
    kills = 20 if soak else 4
    fleet = make_fleet(WORKER__SLOTS=100)
    fleet.start(2)
    for n in range(kills):
        work = {"type": "work", "payload": {"seconds": 1.0}}
        fleet.send({**work, "idempotency_key": f"key-{n}-{each}"} for each in range(20))
        busy = fleet.wait_for(fleet.busy, "a worker has running tasks")
        fleet.kill(fleet.process(fleet.random.choice(busy).pid))
        fleet.wait_until_final()
        fleet.start()
    report = fleet.check(replies_per_run=1, reclaim_limit_s=RECLAIM_S[broker] * ALLOWANCE)
    assert report.busy_kills == kills
    assert print_seconds(seconds_to_the_next_run(fleet)) < (LEASE_S + 3.0) * ALLOWANCE


def print_seconds(found: Iterator[tuple[int, float]]) -> float:
    """Print the middle, the largest, and the largest after each kill. Returns the largest."""
    last: dict[int, float] = {}
    again = []
    for worker_id, seconds in found:
        again.append(seconds)
        last[worker_id] = max(seconds, last.get(worker_id, 0.0))
    again.sort()
    middle = again[len(again) // 2]
    print(f"{len(again)} run again, after {middle:.2f} s (p50), {again[-1]:.2f} s (max)")
    print(f"{len(last)} kills, the last one runs again after", *(f"{s:.2f}" for s in last.values()))
    return again[-1]


def seconds_to_the_next_run(fleet: Fleet) -> Iterator[tuple[int, float]]:
    """The victim, and the time from its kill to the second run, for each of its tasks. (Suspects
    wait for a third.)"""
    killed = {kill.worker_id: kill.at_us for kill in fleet.kills}
    claims = list(History(fleet.database).of_type(CLAIMED))
    first = {event.task_id: event.worker_id for event in claims if event.data["attempt"] == 1}
    for event in claims:
        if event.data["attempt"] == 2 and first[event.task_id] in killed:
            victim = first[event.task_id]
            yield victim, (event.created_at_us - killed[victim]) / 1e6
