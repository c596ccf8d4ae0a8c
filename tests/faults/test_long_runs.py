"""A run that lasts many leases runs once: a thread of its own keeps the worker's lease."""

from functools import partial

import pytest

from tests.faults.conftest import MakeFleet, on_each_broker, on_every_broker

pytestmark = pytest.mark.xdist_group("faults-1")


@on_every_broker(soak=True)
def test_long_run(make_fleet: MakeFleet, broker: str, soak: bool) -> None:
    """Many leases long: a coroutine, a thread and a blocked loop, while another worker looks on."""
    lease = 10 if soak else 2
    seconds = 10 * lease
    fleet = make_fleet(WORKER__SLOTS=10, WORKER__LEASE_S=lease)
    fleet.start(2)
    long = fleet.send(
        [
            {"type": "work", "payload": {"seconds": seconds}},
            {"type": "thread", "payload": {"seconds": seconds}},
            # Blocks the whole loop: nothing but the lease's own thread can say that it lives.
            {"type": "block", "payload": {"seconds": 3 * lease}},
        ]
    )
    fleet.wait_for(partial(fleet.are_running, [s.id for s in long[:2]]), "the long ones run")
    fleet.send([{"type": "work", "payload": {"seconds": 0.1}} for _ in range(50)])
    fleet.wait_until_final(patience_s=20 * lease + 60)
    report = fleet.check()
    assert report.ends == {"task.succeeded": 53}
    assert report.effects == 53, "every message ran once"
    assert fleet.events("task.lost") == 0
    assert fleet.rows("SELECT DISTINCT attempt, crashes FROM queue_executions") == [(1, 0)]


@on_each_broker
def test_a_suspect_may_run_as_long_as_it_takes(make_fleet: MakeFleet) -> None:
    """Killed twice, so that it runs alone: its own worker must not end before it does."""
    fleet = make_fleet(WORKER__SLOTS=2)
    (long,) = fleet.send([{"type": "work", "payload": {"seconds": 8}}])
    for _ in range(2):
        (victim,) = fleet.start()
        worker_id = fleet.worker_of(victim.pid)
        fleet.wait_for(partial(fleet.is_run_by, worker_id, [long.id]), "it runs")
        fleet.kill(victim)
    fleet.start()
    fleet.wait_until_final()
    fleet.check(replies_per_run=1)
    assert fleet.rows("SELECT attempt, crashes FROM queue_executions") == [(3, 2)]
    assert fleet.events("task.released") == 0
