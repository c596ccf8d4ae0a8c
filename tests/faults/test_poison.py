"""Poison: a handler that raises, hangs, exits or crashes its process ruins its own message only."""

import json

import pytest

from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet

pytestmark = pytest.mark.xdist_group("faults-2")

REASONS = {
    "raise": "retries_exhausted",
    "hang": "retries_exhausted",
    "exit": "crash_budget",
    "segfault": "crash_budget",
    "kill": "crash_budget",
}
GOOD = 200


def test_poison(make_fleet: MakeFleet, soak: bool) -> None:
    each = 5 if soak else 1
    fleet = make_fleet(WORKER__SLOTS=20)
    poison = [
        {
            "type": "hang" if kind == "hang" else "poison",
            "id": f"{kind}-{n}",
            "payload": {"kind": kind},
        }
        for kind in REASONS
        for n in range(each)
    ]
    good = [
        {
            "type": "poison",
            "id": f"good-{n}",
            "payload": {"seconds": fleet.random.uniform(0.05, 0.5)},
        }
        for n in range(GOOD)
    ]
    everything = poison + good
    fleet.random.shuffle(everything)
    fleet.send(everything)
    supervisor = fleet.supervise(workers=2)
    fleet.wait_until_final()
    report = fleet.check(replies_per_run=1)
    letters = fleet.rows("SELECT message_id, reason, error, history FROM dead_letters")
    innocent = [letter for letter in letters if letter[0].startswith("good")]
    assert innocent == []
    assert report.ends == {"task.succeeded": GOOD, "task.failed": len(poison)}
    for message in poison:
        ends_as_planned(fleet, str(message["id"]))
    assert {letter[0] for letter in letters} == {message["id"] for message in poison}
    assert supervisor.poll() is None, "the supervisor outlives its workers"
    restarts = (fleet.home / "worker-1.log").read_text().count("another one starts")
    innocents = fleet.one(
        "SELECT count(*) FROM queue_executions WHERE status = 'succeeded' AND crashes > 0"
    )
    print(f"{restarts} workers were replaced; {innocents} good messages ran beside a crash")
    assert restarts > 0
    assert fleet.terminate(supervisor) == 0


def ends_as_planned(fleet: Fleet, message_id: str) -> None:
    """The right reason, after the right number of attempts; the last crash was a lonely one."""
    kind = message_id.partition("-")[0]
    ((reason, error, history, body),) = fleet.rows(
        "SELECT reason, error, history, body FROM dead_letters WHERE message_id = ?", message_id
    )
    past = json.loads(history)
    ((crashes, attempt),) = fleet.rows(
        "SELECT crashes, attempt FROM queue_executions WHERE message_id = ?", message_id
    )
    assert reason == REASONS[kind], (message_id, reason, error)
    assert body, "a dead letter keeps its message"
    if reason == "crash_budget":
        alone = 2 if kind == "kill" else 1  # only a SIGKILL leaves room for doubt
        assert crashes == 3 + alone
        assert [entry["crash"] for entry in past] == [True] * crashes, past
        assert ["alone" in entry["error"] for entry in past] == [False] * 3 + [True] * alone
        ran_alone(fleet, message_id)
        return
    # It may have been hit by a neighbour's crash: that spends no retry.
    failures = [entry for entry in past if not entry.get("crash")]
    assert len(failures) == 2, "one attempt and one retry"
    assert attempt == 2 + crashes
    words = {"raise": "RuntimeError: poison", "hang": "HandlerTimeout"}
    assert all(words[kind] in entry["error"] for entry in failures), past


def ran_alone(fleet: Fleet, message_id: str) -> None:
    """Its last worker had nothing else to lose when it died."""
    last = fleet.one(
        "SELECT json_extract(data, '$.worker') FROM event_log WHERE task_id = ?"
        " AND event_type = 'task.lost' ORDER BY rowid DESC LIMIT 1",
        message_id,
    )
    victims = fleet.rows(
        "SELECT task_id FROM event_log WHERE event_type = 'task.lost'"
        " AND json_extract(data, '$.worker') = ?",
        last,
    )
    assert victims == [(message_id,)]
