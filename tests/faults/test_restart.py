"""Rolling restarts: SIGTERM lets work finish, hands the rest back, and costs nobody an attempt."""

from functools import partial

import pytest

from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet

pytestmark = pytest.mark.xdist_group("faults-2")

BACK_S = 2.0


def test_rolling_restart(make_fleet: MakeFleet, soak: bool) -> None:
    """Every worker is replaced in turn under load; what was unfinished is taken up again."""
    rounds = 10 if soak else 3
    fleet = make_fleet(WORKER__SLOTS=20)
    fleet.start(2)
    total = 0
    for _ in range(rounds):
        # The long ones outlive the time that a stop allows (2 s): they are handed back.
        fleet.send(
            {"type": "work", "payload": {"seconds": seconds}, "idempotency_key": f"key-{total + n}"}
            for n, seconds in enumerate(
                [fleet.random.uniform(0.1, 1) for _ in range(150)] + [5.0] * 10
            )
        )
        total += 160
        for worker in list(fleet.processes):
            restart(fleet, worker.pid)
    fleet.wait_until_final()
    report = fleet.check(replies_per_run=1)
    assert report.ends == {"task.succeeded": total}
    assert fleet.events("task.reclaimed") == 0, "nothing was left for the reaper"
    released = fleet.events("task.released")
    spent = fleet.rows(
        "SELECT message_id, attempt, retry_count, crashes FROM queue_executions"
        " WHERE attempt != 1 OR retry_count != 0 OR crashes != 0"
    )
    assert spent == [], "a restart costs no attempt"
    print(f"{rounds} rounds, {released} runs handed back and run again as attempt 1")
    assert released > 0, "no run outlived its worker: the test shows nothing"


def restart(fleet: Fleet, pid: int) -> None:
    """One worker ends in order and another takes its place."""
    fleet.wait_for(lambda: any(b.pid == pid for b in fleet.busy()), "the worker is busy")
    worker_id = fleet.worker_of(pid)
    before = fleet.one("SELECT max(rowid) FROM event_log")
    assert fleet.terminate(fleet.process(pid)) == 0
    left = fleet.one(
        "SELECT count(*) FROM queue_executions WHERE status = 'running' AND worker_id = ?",
        worker_id,
    )
    assert left == 0, "it ended with runs that it did not hand back"
    assert fleet.one("SELECT state FROM workers WHERE worker_id = ?", worker_id) == "left"
    fleet.start()
    waits = taken_up_after_s(fleet, worker_id, before)
    if waits:
        print(f"{len(waits)} handed back, taken up again after {max(waits):.2f} s at most")


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


def test_killed_at_the_end_of_its_grace(make_fleet: MakeFleet, soak: bool) -> None:
    """A handler that will not be cancelled outlives the grace: SIGKILL, and no retry is spent."""
    fleet = make_fleet(WORKER__SLOTS=20)
    for _ in range(3 if soak else 1):
        (old,) = fleet.start()
        stubborn = fleet.send(
            [{"type": "stubborn", "payload": {"seconds": 6}} for _ in range(3)]
            + [{"type": "work", "payload": {"seconds": 0.5}} for _ in range(20)]
        )[:3]
        ids = [sent.id for sent in stubborn]
        fleet.wait_for(
            partial(fleet.are_running, ids), "the stubborn ones run beside all the others"
        )
        (new,) = fleet.start()
        at = fleet.now_us()
        code = fleet.terminate(old, grace_s=3.0)
        killed_at = fleet.now_us()
        fleet.wait_until_final()
        print(f"ended with {code} {(killed_at - at) / 1e6:.1f} s after SIGTERM")
        for message_id in ids:
            attempt, retries = fleet.rows(
                "SELECT attempt, retry_count FROM queue_executions WHERE message_id = ?", message_id
            )[0]
            assert retries == 0, "a stop is no failure of the message"
            assert attempt <= 2
        fleet.terminate(new)
    fleet.check()
    back = [taken_up_after_s(fleet, worker_id, 0) for worker_id, _ in fleet.pids()]
    assert all(seconds < BACK_S * 3 for waits in back for seconds in waits), back


def test_a_restart_does_not_cost_a_thread_its_crash_budget(make_fleet: MakeFleet) -> None:
    """A plain function cannot be stopped; being restarted three times must not make it poison."""
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
