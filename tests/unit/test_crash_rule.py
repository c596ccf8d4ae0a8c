"""Which deaths count, and the few slots of a process that replaces one that crashed."""

from __future__ import annotations

from typing import Any

import pytest

from ackbone.core.store import Company, Worker
from ackbone.engine.flow import Slots
from ackbone.engine.worker_relays import SlowStart
from ackbone.store.workers import Gone, Judgement, crashes_of, judge
from ackbone.testing.clock import FakeClock

ME = Worker(worker_id=7, name="me")
GONE = Gone(
    worker_id=3,
    state="alive",
    name="it",
    parent="a supervisor",
    parent_lives=False,
    machine_lives=True,
    sibling_lives=False,
    outlived=False,
)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, Judgement.HAND_BACK),
        ({"sibling_lives": True}, Judgement.COUNT),
        ({"outlived": True}, Judgement.COUNT),
        ({"outlived": True, "state": "leaving"}, Judgement.HAND_BACK),
        ({"parent": None}, Judgement.COUNT),
        ({"parent": None, "machine_lives": False}, Judgement.HAND_BACK),
        ({"parent": "worker:5", "parent_lives": True, "outlived": True}, Judgement.LEAVE),
        ({"parent": "worker:5", "outlived": True}, Judgement.HAND_BACK),
        ({"parent": "worker:7"}, Judgement.LEAVE),
        ({"parent": "worker:7", "name": "ended"}, Judgement.COUNT),
    ],
)
def test_which_deaths_count(known: dict[str, Any], expected: Judgement) -> None:
    assert judge(GONE._replace(**known), ME, {"ended": -9}) is expected


def test_each_number_of_crashes_has_one_company() -> None:
    for isolates in (True, False):
        ranges = [crashes_of(company, isolates=isolates) for company in Company]
        for crashes in range(10):
            assert sum(low <= crashes <= high for low, high in ranges) == 1


async def test_slots_double_every_second_until_all_are_there() -> None:
    clock = FakeClock()
    slots = {"a": Slots(100), "b": Slots(5)}
    ramp = SlowStart(slots, clock)
    seen = []
    for _ in range(6):
        seen.append((slots["a"].size, slots["b"].size))
        clock.advance(0.5)
        await ramp.step(ME)
        clock.advance(0.5)
        await ramp.step(ME)
    assert seen == [(4, 4), (8, 5), (16, 5), (32, 5), (64, 5), (100, 5)]
