"""Rolling restarts: SIGTERM lets work finish, hands the rest back, and costs nobody an attempt."""

from functools import partial

import pytest

from tests.conftest import ALLOWANCE
from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet

pytestmark = pytest.mark.xdist_group("faults-2")

BACK_S = 2.0


@pytest.mark.parametrize("killed", [False, True], ids=["drained", "killed at the end of its grace"])
def test_rolling_restart(make_fleet: MakeFleet, soak: bool, killed: bool) -> None:
    """Every worker is replaced in turn under load; what was unfinished is taken up again.

    One that drains hands back what outlives the time that it has. One that is killed before leaves
    that to the others, who find out at once.
    """
    rounds = 10 if soak else 3
    fleet = make_fleet(
        WORKER__SLOTS=20,
        WORKER__SHUTDOWN_TIMEOUT_S=30 if killed else 2,
        WORKER__CRASH_BUDGET=1000,  # the long ones meet many restarts, and are no poison
    )
    fleet.start(2)
    total = 0
    waits: list[float] = []
    for _ in range(rounds):
        fleet.send(
            {"type": "work", "payload": {"seconds": seconds}, "idempotency_key": f"key-{total + n}"}
            for n, seconds in enumerate(
                [5.0] * 10 + [fleet.random.uniform(0.1, 1) for _ in range(150)]
            )
        )
        total += 160
        for worker in list(fleet.processes):
            waits += restart(fleet, worker.pid, killed=killed)
    fleet.wait_until_final()
    report = fleet.check(replies_per_run=1)
    assert report.ends == {"task.succeeded": total}
    assert waits, "no run outlived its worker: the test shows nothing"
    print(f"{rounds} rounds, {len(waits)} unfinished, back after {max(waits):.2f} s at most")
    assert max(waits) < BACK_S * ALLOWANCE
    spent = fleet.rows(
        "SELECT message_id, attempt, retry_count, crashes FROM queue_executions"
        " WHERE attempt != 1 OR retry_count != 0 OR crashes != 0"
    )
    assert spent == [], "a restart costs no attempt, and is no crash"
    assert fleet.events("task.lost") == 0, "every stop was announced"


def restart(fleet: Fleet, pid: int, *, killed: bool) -> list[float]:
    """One worker ends and another takes its place. Returns after how many seconds what it had not
    finished was in the hands of others."""
    fleet.wait_for(lambda: any(b.pid == pid for b in fleet.busy()), "the worker is busy")
    worker_id = fleet.worker_of(pid)
    before = fleet.one("SELECT max(rowid) FROM event_log")
    if not killed:
        assert fleet.terminate(fleet.process(pid)) == 0
        assert running_of(fleet, worker_id) == 0, "it ended with runs that it did not hand back"
        assert fleet.one("SELECT state FROM workers WHERE worker_id = ?", worker_id) == "left"
        fleet.start()
        return taken_up_after_s(fleet, worker_id, before)
    assert fleet.terminate(fleet.process(pid), grace_s=2.0) in (0, -9)
    ended_at = fleet.now_us()
    fleet.start()
    fleet.wait_for(lambda: running_of(fleet, worker_id) == 0, "its tasks are given back")
    found = fleet.rows(
        "SELECT created_at FROM event_log WHERE event_type = 'task.released' AND rowid > ?"
        " AND json_extract(data, '$.worker') = ?",
        before,
        worker_id,
    )
    return [max(0, at - ended_at) / 1e6 for (at,) in found]


def running_of(fleet: Fleet, worker_id: int | None) -> int:
    found: int = fleet.one(
        "SELECT count(*) FROM queue_executions WHERE status = 'running' AND worker_id = ?",
        worker_id,
    )
    return found


def taken_up_after_s(fleet: Fleet, worker_id: int | None, since: int) -> list[float]:
    """From being handed back to being claimed by another, for those that were claimed again."""
    found = fleet.rows(
        "SELECT r.task_id, min(c.created_at) - r.created_at FROM event_log r JOIN event_log c"
        " ON c.task_id = r.task_id AND c.rowid > r.rowid AND c.event_type = 'task.claimed'"
        " WHERE r.event_type = 'task.released' AND r.worker_id = ? AND r.rowid > ?"
        " GROUP BY r.rowid",
        worker_id,
        since,
    )
    return [micros / 1e6 for _, micros in found]


@pytest.mark.parametrize(
    ("shutdown_s", "code", "attempt", "crashes"),
    [(30, -9, 1, 0), (1, 0, 1, 0)],
    ids=["killed at the end of its grace", "gone before the end of its grace"],
)
def test_a_handler_that_will_not_be_cancelled(
    make_fleet: MakeFleet, shutdown_s: int, code: int, attempt: int, crashes: int
) -> None:
    """SIGTERM, then SIGKILL after the grace: what had ended is settled, the rest costs no retry."""
    fleet = make_fleet(WORKER__SLOTS=30, WORKER__SHUTDOWN_TIMEOUT_S=shutdown_s)
    (old,) = fleet.start()
    stubborn = fleet.send([{"type": "stubborn", "payload": {"seconds": 15}} for _ in range(3)])
    quick = fleet.send([{"type": "work", "payload": {"seconds": 0.3}} for _ in range(20)])
    ids = [sent.id for sent in stubborn]
    fleet.wait_for(partial(fleet.are_running, ids), "the stubborn ones run")
    fleet.wait_for(partial(fleet.has_finished, 1), "the others run beside them")
    (new,) = fleet.start()
    at = fleet.now_us()
    assert fleet.terminate(old, grace_s=2.0 if code else 20.0) == code
    ended_at = fleet.now_us()
    fleet.wait_for(partial(fleet.is_run_by, fleet.worker_of(new.pid), ids), "they run elsewhere")
    taken_up = fleet.one("SELECT max(created_at) FROM event_log WHERE event_type = 'task.claimed'")
    fleet.wait_until_final()
    report = fleet.check()
    back_s = (taken_up - ended_at) / 1e6
    print(f"ended {(ended_at - at) / 1e6:.1f} s after SIGTERM, all taken up {back_s:.1f} s later")
    assert back_s < BACK_S * ALLOWANCE
    assert report.ends == {"task.succeeded": 23}
    for message_id in ids:
        assert fleet.rows(
            "SELECT attempt, retry_count, crashes FROM queue_executions WHERE message_id = ?",
            message_id,
        ) == [(attempt, 0, crashes)]
    assert all(fleet.events("task.claimed", sent.id) == 1 for sent in quick)


def test_a_restart_does_not_cost_a_thread_its_crash_budget(make_fleet: MakeFleet) -> None:
    """A plain function cannot be stopped; three restarts must not make poison of its message."""
    fleet = make_fleet(WORKER__SLOTS=4, WORKER__SHUTDOWN_TIMEOUT_S=0.2)
    (sent,) = fleet.send([{"type": "thread", "payload": {"seconds": 4}}])
    for _ in range(4):
        (worker,) = fleet.start()
        fleet.wait_for(partial(fleet.are_running, [sent.id]), "the thread runs")
        fleet.terminate(worker)
    fleet.start()
    fleet.wait_until_final()
    fleet.check()
    assert fleet.status(sent.id) == "succeeded"
    assert fleet.rows("SELECT attempt, crashes FROM queue_executions") == [(1, 0)]
