"""Operators and workers killed in the middle of a replay: each letter is sent, and sent once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import partial

import pytest

from tests.faults.conftest import MakeFleet, on_each_broker
from tests.faults.harness import Fleet

REPLAY = ("dlq", "replay", "--all", "--set", "payload.kind=none", "--rate", "300/s")


class Operators:
    """Processes that replay everything, two at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.killed = 0
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for _ in range(2):
            with (self.fleet.home / "operators.log").open("ab") as log:
                self.running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "ackbone", *REPLAY],
                        env=self.fleet.environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )

    def kill(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
                self.killed += 1
            process.wait()
        self.running.clear()

    def wait(self) -> None:
        for process in self.running:
            process.wait(60)
        self.running.clear()

    def settled(self) -> int:
        return int(self.fleet.one("SELECT count(*) FROM dead_letters WHERE state <> 'open'"))

    def have_settled(self, letters: int) -> bool:
        return self.settled() >= letters

    def log(self) -> str:
        return (self.fleet.home / "operators.log").read_text(errors="replace")[-3000:]


@on_each_broker
@pytest.mark.timeout(300)
def test_replays_that_are_killed_send_each_letter_once(make_fleet: MakeFleet, soak: bool) -> None:
    letters, rounds = (6_000, 30) if soak else (400, 3)
    fleet = make_fleet()
    fleet.start(2)
    fleet.send(
        {"type": "poison", "payload": {"kind": "raise", "seconds": 0, "n": n}, "id": f"m-{n}"}
        for n in range(letters)
    )
    fleet.wait_until_final(patience_s=120)
    assert fleet.one("SELECT count(*) FROM dead_letters WHERE state = 'open'") == letters

    operators = Operators(fleet)
    try:
        for number in range(rounds):
            before = operators.settled()
            goal = before + fleet.random.randrange(1, letters // (2 * rounds))
            operators.start()
            fleet.wait_for(partial(operators.have_settled, goal), f"round {number}")
            operators.kill()
            victim = fleet.random.choice(fleet.processes)
            fleet.kill(victim)  # the one that carries the outbox to the broker, perhaps
            fleet.start(1)
        assert operators.settled() < letters, "the kills came too late to mean anything"
        assert operators.killed == 2 * rounds, operators.log()
        operators.start()
        operators.wait()
    finally:
        operators.kill()
    _check(fleet, letters)


def _check(fleet: Fleet, letters: int) -> None:
    found = fleet.rows("SELECT message_id, state, replay_id FROM dead_letters")
    assert {state for _, state, _ in found} == {"replayed"}
    replays = {replay_id for _, _, replay_id in found}
    assert len(found) == len(replays) == letters
    fleet.wait_for(lambda: fleet.has_finished(2 * letters), "every replay runs", patience_s=120)
    statuses = Counter(fleet.rows("SELECT status FROM queue_executions"))
    assert statuses == {("failed",): letters, ("succeeded",): letters}
    done = fleet.rows("SELECT message_id FROM queue_executions WHERE status = 'succeeded'")
    assert {message_id for (message_id,) in done} == replays
    acts = Counter(
        task
        for (task,) in fleet.rows("SELECT task_id FROM event_log WHERE event_type = 'dlq.edited'")
    )
    assert acts == {f"m-{n}": 1 for n in range(letters)}
    fleet.wait_for(lambda: not fleet.one("SELECT count(*) FROM outbox"), "the outbox is empty")
    finals = fleet.rows(
        "SELECT task_id, count(*) FROM event_log WHERE event_type IN ('task.succeeded',"
        " 'task.failed') GROUP BY 1 HAVING count(*) <> 1"
    )
    assert finals == []
