"""Two apps with different handlers on one queue, and kills: each message goes to the app that has
its handler, and is parked once at most."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet

pytestmark = pytest.mark.xdist_group("faults-2")

SIDES = ("left", "right")
TYPES = 20
TARGETS = {side: f"{Path(__file__).with_name('mixed_apps.py')}:{side}" for side in SIDES}


@pytest.mark.parametrize(
    "broker",
    [
        "embedded",
        pytest.param("redis+postgres", marks=pytest.mark.xdist_group("faults-postgres")),
    ],
    indirect=True,
)
def test_mixed_fleet(make_fleet: MakeFleet, broker: str, soak: bool) -> None:
    total, kills = (5_000, 20) if soak else (400, 4)
    fleet = make_fleet(WORKER__SLOTS=10)
    sides = {f"m-{n}": SIDES[n % 2] for n in range(total)}
    fleet.send(
        {
            "id": message_id,
            "type": f"{side}.{n // 2 % TYPES}",
            "payload": {"seconds": 0.2 + 0.8 * fleet.random.random() ** 3},
            "idempotency_key": f"key-{n}",
            # The streams of the task protocol have no order.
            "ordering_key": f"talk-{n % 7}" if broker == "embedded" and n % 5 == 0 else None,
        }
        for n, (message_id, side) in enumerate(sides.items())
    )
    (process,) = fleet.start(target=TARGETS["left"])
    # Nobody handles the other app's messages yet: they are parked, and wait for its first worker.
    fleet.wait_for(lambda: fleet.events("task.parked") > 0, "a message is parked")
    running = {"left": process}
    (running["right"],) = fleet.start(target=TARGETS["right"])
    for n in range(kills):
        moment = total * (n + 1) / (kills + 2)
        fleet.wait_for(partial(fleet.has_finished, moment), f"{moment:.0f} are finished")
        busy = {each.pid for each in fleet.wait_for(fleet.busy, "a worker is busy")}
        side = next(side for side, process in running.items() if process.pid in busy)
        fleet.kill(running.pop(side))
        (running[side],) = fleet.start(target=TARGETS[side])
    fleet.wait_until_final()
    report = fleet.check()
    assert report.ends["task.succeeded"] == total
    assert results(fleet) == sides, "each message ran in the app that handles it"
    parked = Counter(
        task for (task,) in fleet.rows(
            "SELECT task_id FROM event_log WHERE event_type = 'task.parked'"
        )
    )  # fmt: skip
    print(f"{len(parked)} of {total} were parked, {kills} kills")
    assert set(parked.values()) == {1}, "a message is parked once at most"
    assert report.busy_kills >= kills / 2


def results(fleet: Fleet) -> dict[str, str]:
    """By message, the app that ran it."""
    return {
        message_id: bytes(result).decode().strip('"')
        for message_id, result in fleet.rows("SELECT message_id, result FROM queue_executions")
    }
