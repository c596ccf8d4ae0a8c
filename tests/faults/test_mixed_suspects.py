"""Two apps with different handlers on one store, both with suspects: each warden starts children
for the suspects of its own app alone."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet

pytestmark = pytest.mark.xdist_group("faults-2")

SIDES = ("left", "right")
TARGETS = {side: f"{Path(__file__).with_name('suspect_apps.py')}:{side}" for side in SIDES}
RIGHTS = 20
"""More than the one child of that app runs at a time."""


def kill_worker_of(fleet: Fleet, message_id: str) -> None:
    """SIGKILL for the process that runs a message. Returns when its death is known."""
    name = fleet.one(
        "SELECT w.name FROM queue_executions q JOIN workers w ON w.worker_id = q.worker_id"
        " WHERE q.message_id = ? AND q.status = 'running'",
        message_id,
    )
    pid = int(name.rsplit(":", 1)[1])
    os.kill(pid, signal.SIGKILL)
    fleet.wait_for(lambda: fleet.worker_of(pid) is None, "its death is known")


def run(fleet: Fleet, side: str, count: int, *, crashes: int) -> bool:
    """Do exactly so many messages of an app run that crashed so often?"""
    found = fleet.one(
        "SELECT count(*) FROM queue_executions WHERE status = 'running' AND event_name = ?"
        " AND crashes = ?",
        side,
        crashes,
    )
    return bool(found == count)


def crash(fleet: Fleet, side: str, count: int, *, crashes: int) -> None:
    """Kill the worker that runs all messages of an app, until they have one crash more.

    A death counts for nobody if the worker that finds out has only just begun: it may be the first
    one after a crash of the whole machine.
    """
    crashed = "SELECT min(crashes) FROM queue_executions WHERE event_name = ?"
    while fleet.one(crashed, side) == crashes:
        fleet.wait_for(partial(run, fleet, side, count, crashes=crashes), f"{side}: all run")
        kill_worker_of(fleet, f"{side}-0")


def children(home: Path, side: str) -> list[str]:
    """The company of each child process of an app that was started."""
    lines = [line.split() for line in (home / "starts").read_text().splitlines()]
    return [line[2] for line in lines if line[:2] == [TARGETS[side], "--company"]]


@pytest.mark.parametrize(
    "broker",
    [
        "embedded",
        pytest.param("redis+postgres", marks=pytest.mark.xdist_group("faults-postgres")),
    ],
    indirect=True,
)
def test_no_warden_starts_children_for_suspects_of_another_app(make_fleet: MakeFleet) -> None:
    few = {"WORKER__SLOTS": 2 * RIGHTS, "WORKER__SOLO_CHILDREN": 1}
    left, right = make_fleet(WORKER__SOLO_CHILDREN=8), make_fleet(**few)
    supervisors = [
        (fleet, fleet.supervise(workers=1, target=TARGETS[side]))
        for fleet, side in ((left, "left"), (right, "right"))
    ]
    left.wait_for(lambda: len(left.pids()) == 2, "both apps have a worker")
    left.send([{"type": "left", "id": "left-0", "payload": None}])
    left.send([{"type": "right", "id": f"right-{n}", "payload": None} for n in range(RIGHTS)])
    for side, count in (("left", 1), ("right", RIGHTS)):
        left.wait_for(partial(run, left, side, count, crashes=0), f"{side}: all run")
    for crashes in range(2):
        crash(left, "left", 1, crashes=crashes)
        crash(left, "right", RIGHTS, crashes=crashes)
    left.wait_for(partial(run, left, "left", 1, crashes=2), "the left one runs in a child")
    left.wait_for(partial(run, left, "right", 8, crashes=2), "a right group runs, others wait")
    kill_worker_of(left, "left-0")
    left.wait_for(partial(run, left, "left", 1, crashes=3), "the left warden has looked again")
    assert run(left, "right", 8, crashes=2), "suspects of the other app waited meanwhile"
    (left.home / "go").touch()
    left.wait_until_final()
    for fleet, supervisor in supervisors:
        assert fleet.terminate(supervisor) == 0
    ends = left.rows("SELECT event_name, status, count(*) FROM queue_executions GROUP BY 1, 2")
    assert sorted(ends) == [("left", "succeeded", 1), ("right", "succeeded", RIGHTS)]
    # The number of children is open: a child that is slow to come up gets another one beside it.
    assert set(children(left.home, "left")) == {"few", "none"}
    assert set(children(left.home, "right")) == {"few"}
    assert left.events("task.parked") == 0
