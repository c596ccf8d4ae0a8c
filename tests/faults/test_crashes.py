"""Deaths of processes, and whom they count for: nobody who is not to blame."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import MakeFleet, on_each_broker
from tests.faults.harness import Fleet

pytestmark = pytest.mark.xdist_group("faults-2")

TARGET = f"{Path(__file__).with_name('poison_app.py')}:app"


def good(count: int, seconds: float, type_: str = "poison") -> list[dict[str, Any]]:
    return [
        {"type": type_, "id": f"good-{n}", "payload": {"seconds": seconds}} for n in range(count)
    ]


def running(fleet: Fleet) -> int:
    return int(fleet.one("SELECT count(*) FROM queue_executions WHERE status = 'running'") or 0)


def kill_all(fleet: Fleet, supervisor: subprocess.Popen[bytes]) -> None:
    """SIGKILL for every process of ours at once."""
    os.killpg(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    fleet.processes.remove(supervisor)


def nobody_is_suspect(fleet: Fleet, innocents: Sequence[dict[str, Any]]) -> None:
    """All of them succeeded, and no crash was counted against any of them."""
    found = fleet.rows(
        "SELECT status, crashes, count(*) FROM queue_executions"
        " WHERE message_id LIKE 'good%' GROUP BY 1, 2"
    )
    assert found == [("succeeded", 0, len(innocents))], found
    assert fleet.rows("SELECT message_id FROM dead_letters WHERE message_id LIKE 'good%'") == []


@on_each_broker
@pytest.mark.parametrize("ms", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_poison_does_not_hold_up_the_others(
    make_fleet: MakeFleet, broker: str, soak: bool, ms: int
) -> None:
    """2 % of the messages kill their process, by all means."""
    count, bad, limit_s = (5000, 100, {10: 45, 200: 75}[ms]) if soak else (300, 6, 0)
    if broker != "embedded":
        limit_s = 0  # a crash costs more: another worker has to take the entries over
    fleet = make_fleet(WORKER__LEASE_S=10 if soak else 3)
    kinds = ("exit", "segfault", "kill")
    poison = [
        {"type": "poison", "id": f"bad-{n}", "payload": {"kind": kinds[n % 3]}} for n in range(bad)
    ]
    messages = poison + good(count - bad, ms / 1000)
    fleet.random.shuffle(messages)
    fleet.send(messages)
    began = time.monotonic()
    supervisor = fleet.supervise(workers=2, target=TARGET)
    fleet.wait_until_final()
    took_s = time.monotonic() - began
    print(f"{count} messages of {ms} ms, {bad} poison: {took_s:.1f} s, load {os.getloadavg()}")
    ends = fleet.rows("SELECT status, count(*) FROM queue_executions GROUP BY 1 ORDER BY 1")
    assert ends == [("failed", bad), ("succeeded", count - bad)]
    letters = fleet.rows("SELECT message_id, reason FROM dead_letters")
    assert {reason for _, reason in letters} == {"crash_budget"}
    assert {message_id for message_id, _ in letters} == {each["id"] for each in poison}
    for message_id, error in fleet.rows("SELECT message_id, error FROM dead_letters"):
        assert "while running it alone" in error, (message_id, error)
    assert fleet.terminate(supervisor) == 0
    assert not limit_s or took_s < limit_s


@on_each_broker
def test_suspects_run_many_at_a_time(make_fleet: MakeFleet, soak: bool) -> None:
    """A worker with all slots taken is killed twice: what it ran is done soon."""
    count, seconds, within_s = (100, 5.0, 25.0) if soak else (40, 1.0, 0.0)
    fleet = make_fleet(WORKER__SLOTS=count, WORKER__LEASE_S=10 if soak else 3)
    fleet.send(good(count, seconds))
    supervisor = fleet.supervise(workers=1, target=TARGET)
    killed: list[int] = []
    for _ in range(2):
        fleet.wait_for(lambda: running(fleet) >= min(count, 8), "the worker is busy")
        pid = max(pid for worker, pid in fleet.pids() if fleet.worker_of(pid) == worker)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
        fleet.wait_for(lambda: fleet.worker_of(killed[-1]) is None, "its death is known")
    began = time.monotonic()
    fleet.wait_until_final()
    took_s = time.monotonic() - began
    print(f"{count} runs of {seconds} s: {took_s:.1f} s after the second kill, {os.getloadavg()}")
    assert fleet.rows("SELECT DISTINCT status FROM queue_executions") == [("succeeded",)]
    assert fleet.one("SELECT max(crashes) FROM queue_executions") >= 2
    assert fleet.terminate(supervisor) == 0
    assert not within_s or took_s < within_s


@on_each_broker
def test_a_crash_of_the_whole_machine_counts_for_nobody(make_fleet: MakeFleet, soak: bool) -> None:
    fleet = make_fleet(WORKER__SLOTS=20)
    messages = good(30, 3.0)
    fleet.send(messages)
    for _ in range(10 if soak else 4):
        supervisor = fleet.supervise(workers=2, target=TARGET)
        fleet.wait_for(lambda: running(fleet) >= 20, "the workers are busy")
        kill_all(fleet, supervisor)
    supervisor = fleet.supervise(workers=2, target=TARGET)
    fleet.wait_until_final()
    nobody_is_suspect(fleet, messages)
    assert fleet.terminate(supervisor) == 0


@on_each_broker
def test_an_announced_stop_counts_for_nobody(make_fleet: MakeFleet, soak: bool) -> None:
    """SIGTERM, then SIGKILL before the runs have ended, as container platforms do it."""
    fleet = make_fleet(WORKER__SLOTS=20, WORKER__SHUTDOWN_TIMEOUT_S=30)
    messages = good(30, 3.0)
    fleet.send(messages)
    for _ in range(10 if soak else 4):
        supervisor = fleet.supervise(workers=2, target=TARGET)
        fleet.wait_for(lambda: running(fleet) >= 20, "the workers are busy")
        supervisor.send_signal(signal.SIGTERM)
        fleet.wait_for(
            lambda: not fleet.one("SELECT count(*) FROM workers WHERE state = 'alive'"),
            "all workers have announced that they leave",
        )
        kill_all(fleet, supervisor)
    supervisor = fleet.supervise(workers=2, target=TARGET)
    fleet.wait_until_final()
    nobody_is_suspect(fleet, messages)
    assert fleet.terminate(supervisor) == 0


def test_a_stuck_thread_counts_for_itself_alone(make_fleet: MakeFleet) -> None:
    """Its worker is replaced. The others begin again, and the stuck one spends its retries."""
    fleet = make_fleet(WORKER__SLOTS=40, WORKER__RECYCLE_GRACE_S=0.5, WORKER__LEASE_S=1)
    messages = good(30, 2.0, "plain")
    fleet.send([{"type": "stuck", "id": "stuck", "payload": None}, *messages])
    supervisor = fleet.supervise(workers=1, target=TARGET)
    fleet.wait_until_final()
    nobody_is_suspect(fleet, messages)
    ((reason, error),) = fleet.rows("SELECT reason, error FROM dead_letters")
    assert reason == "retries_exhausted"
    assert "HandlerTimeout" in error
    ((crashes, attempt),) = fleet.rows(
        "SELECT crashes, attempt FROM queue_executions WHERE message_id = 'stuck'"
    )
    assert (crashes, attempt) == (0, 2)
    assert fleet.terminate(supervisor) == 0
