"""A worker that stands still past its lease is dead; what it does when it wakes is refused."""

import json
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.conftest import MakeFleet, on_every_broker
from tests.faults.harness import Fleet

pytestmark = pytest.mark.xdist_group("faults-1")


@on_every_broker()
def test_zombie(make_fleet: MakeFleet, soak: bool) -> None:
    """SIGSTOP past the lease, another finishes, SIGCONT: the other one's result is committed."""
    # An ordered queue has one reader, which would be the paused one.
    fleet = make_fleet(WORKER__SLOTS=10, QUEUES__DEFAULT__ORDERED="false")
    for n in range(20 if soak else 1):
        one_zombie(fleet, fleet.home / f"go-{n}")
    fleet.check()


def one_zombie(fleet: Fleet, go: Path) -> None:
    (zombie,) = fleet.start()
    sent = fleet.send([{"type": "late", "payload": {"until": str(go)}} for _ in range(5)])
    ids = [each.id for each in sent]
    fleet.wait_for(partial(fleet.is_run_by, fleet.worker_of(zombie.pid), ids), "all five run")
    dead = fleet.worker_of(zombie.pid)
    fleet.pause(zombie)
    (other,) = fleet.start()
    fleet.wait_for(partial(fleet.is_run_by, fleet.worker_of(other.pid), ids), "they run elsewhere")
    # Messages wait when the zombie wakes, with slots to spare: a dead number must not claim them.
    fleet.pause(other)
    more = fleet.send([{"type": "work", "payload": {"seconds": 0.01}} for _ in range(20)])
    go.touch()  # both copies may end now, and the zombie is first
    fleet.resume(zombie)
    fresh = fleet.wait_for(partial(fleet.new_number, zombie, dead), "the zombie registers anew")
    fleet.wait_for(partial(has_worked, fleet, fresh), "it works on under its new number")
    assert all(fleet.status(message_id) == "running" for message_id in ids), "its commit is refused"
    fleet.resume(other)
    fleet.wait_until_final()
    for message_id in ids:
        ((result, attempt, crashes),) = fleet.rows(
            "SELECT result, attempt, crashes FROM queue_executions WHERE message_id = ?", message_id
        )
        assert json.loads(result)["pid"] == other.pid, "the result is the other one's"
        assert (attempt, crashes) == (2, 1)
    claims = fleet.one(
        "SELECT count(*) FROM event_log WHERE event_type = 'task.claimed' AND worker_id = ?", dead
    )
    if fleet.variables.get("ACKBONE__BROKER") != "postgresql":
        # There a take may have begun before the worker was paused, and find and commit messages
        # after it woke. The reaper gives them back like others of a dead number.
        assert claims == len(ids), "nothing was claimed under the dead number"
    assert all(fleet.status(each.id) == "succeeded" for each in more)
    for process in (zombie, other):
        assert fleet.terminate(process) == 0


def has_worked(fleet: Fleet, worker_id: int) -> bool:
    return bool(
        fleet.one(
            "SELECT count(*) FROM event_log WHERE event_type = 'task.succeeded' AND worker_id = ?",
            worker_id,
        )
    )


def test_a_worker_that_is_stuck_gives_up(make_fleet: MakeFleet) -> None:
    """Its loop stands still past the limit: stacks are written, its lease ends, others go on."""
    fleet = make_fleet(WORKER__SLOTS=5, WORKER__STALL_LIMIT_S=3, WORKER__RECYCLE_GRACE_S=60)
    (stuck,) = fleet.start()
    (blocking,) = fleet.send([{"type": "block", "payload": {"seconds": 12, "times": 1}}])
    fleet.wait_for(fleet.oracle.effects, "the loop is blocked")
    before = fleet.worker_of(stuck.pid)
    (other,) = fleet.start()
    fleet.send([{"type": "work", "payload": {}} for _ in range(10)])
    fleet.wait_until_final()
    ((result, attempt, crashes),) = fleet.rows(
        "SELECT result, attempt, crashes FROM queue_executions WHERE message_id = ?", blocking.id
    )
    assert json.loads(result)["pid"] == other.pid
    assert (attempt, crashes) == (2, 1)
    log = (fleet.home / "worker-1.log").read_text()
    assert "the event loop stood still" in log
    assert "in block" in log, "the stacks show who held it up"
    # When the loop moves again the worker learns that it was declared dead, and begins anew.
    fresh = fleet.wait_for(partial(fleet.new_number, stuck, before), "it registers anew")
    fleet.pause(other)
    fleet.send([{"type": "work", "payload": {}}])
    fleet.wait_for(partial(has_worked, fleet, fresh), "it works on under its new number")
    fleet.resume(other)
    fleet.check()


@pytest.mark.parametrize("payload", [{"seconds": 1000}, {"seconds": 0, "spin": True}])
def test_a_worker_that_is_stuck_for_good_is_replaced(
    make_fleet: MakeFleet, payload: dict[str, object]
) -> None:
    """Alone under its supervisor, so that nothing goes on unless its process ends."""
    fleet = make_fleet(WORKER__SLOTS=5, WORKER__STALL_LIMIT_S=3, WORKER__RECYCLE_GRACE_S=1)
    supervisor = fleet.supervise(workers=1)
    (blocking,) = fleet.send([{"type": "block", "payload": payload}])
    fleet.wait_for(fleet.oracle.effects, "the loop is blocked")
    fleet.send([{"type": "work", "payload": {}} for _ in range(10)])
    fleet.wait_until_final()
    fleet.check()
    assert fleet.rows(
        "SELECT status, attempt, crashes FROM queue_executions WHERE message_id = ?", blocking.id
    ) == [("succeeded", 2, 1)]
    log = (fleet.home / "worker-1.log").read_text()
    assert "in block" in log, "the stacks show who held it up"
    assert "ended (exit code 75)" in log
    assert fleet.terminate(supervisor) == 0


def test_killing_the_holder_of_a_role_delays_it_by_one_lease_at_most(make_fleet: MakeFleet) -> None:
    """What one worker of the fleet does for all goes over to another when that one dies."""
    fleet = make_fleet()
    fleet.start(2)
    for n in range(3):
        holder = fleet.wait_for(partial(holder_of, fleet, "suspects%"), "someone has the role")
        pid = dict(fleet.pids())[holder]
        if n < 2:
            fleet.kill(fleet.process(pid))  # its lock is free: seen at the next look
        else:
            fleet.pause(fleet.process(pid))  # its lock is held: dead by its lease
        since = time.monotonic()
        fleet.wait_for(partial(someone_else_has, fleet, "suspects%", holder), "another one has it")
        took = time.monotonic() - since
        print(f"{'paused' if n == 2 else 'killed'}: the role was taken over after {took:.2f} s")
        assert took < 3 * 2.0 * 2, "at most twice the lease of 2 s, with room for a slow machine"
        fleet.start()


def holder_of(fleet: Fleet, role: str) -> int | None:
    found = fleet.one(
        "SELECT worker_id FROM roles JOIN workers USING (worker_id)"
        " WHERE role LIKE ? AND workers.state = 'alive'",
        role,
    )
    return None if found is None else int(found)


def someone_else_has(fleet: Fleet, role: str, before: int) -> bool:
    return holder_of(fleet, role) not in (None, before)
