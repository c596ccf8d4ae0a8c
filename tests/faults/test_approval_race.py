"""Two people answer at once, and workers are killed meanwhile: one wins, it runs once or never."""

import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import MakeFleet, on_each_broker
from tests.faults.harness import Fleet

pytestmark = pytest.mark.xdist_group("faults-2")

ANSWERER = Path(__file__).with_name("answerer.py")
RULES = "rules: [{name: everything, match: {type: work}, then: approve}]\n"


class Person:
    """A process that answers approvals."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        self.name = name
        with (fleet.home / f"{name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, ANSWERER, name],
                env=fleet.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.heard() == {"ready": name}

    def say(self, word: str, approval_id: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {approval_id}\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self.name} ended with {self._process.poll()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> "Person":
        return self

    def __exit__(self, *failure: object) -> None:
        """Goes home, whatever happened."""
        _, _ = self._process.communicate(timeout=60)


def kill_a_busy_one(fleet: Fleet) -> None:
    busy = fleet.wait_for(fleet.busy, "a worker has running tasks")
    fleet.kill(fleet.process(fleet.random.choice(busy).pid))
    fleet.start()


def asked(fleet: Fleet) -> int:
    return int(fleet.one("SELECT count(*) FROM approvals") or 0)


def has_asked(fleet: Fleet, wanted: int) -> bool:
    return asked(fleet) >= wanted


def race(fleet: Fleet, anna: Person, bob: Person, approval_id: str) -> tuple[str, str]:
    """Both answer at once; who won, and what it is then. The loser is told both."""
    words = fleet.random.choice(
        [("approve", "approve"), ("approve", "reject"), ("reject", "approve")]
    )
    people = fleet.random.sample([(anna, words[0]), (bob, words[1])], 2)
    for person, word in people:
        person.say(word, approval_id)
    answers = [(person, word, person.heard()) for person, word in people]
    ((winner, word, _),) = [each for each in answers if each[2]["won"]]
    ((_, _, loser),) = [each for each in answers if not each[2]["won"]]
    state = "approved" if word == "approve" else "rejected"
    assert f"was {state} by {winner.name} at " in loser["told"]
    return winner.name, state


@on_each_broker
def test_approval_race(make_fleet: MakeFleet, broker: str, home: Path, soak: bool) -> None:
    races, kills = (500, 50) if soak else (100, 5)
    (home / "rules.yaml").write_text(RULES)
    fleet = make_fleet(WORKER__SLOTS=10, RULES=home / "rules.yaml")
    # Long enough that a killed worker has something in hand.
    fleet.send({"type": "work", "payload": {"seconds": 0.5}, "id": f"m-{n}"} for n in range(races))
    fleet.start(2)
    while_asking = kills // 5
    for n in range(while_asking):  # whoever asks may die, too: each question is put once
        part = races * (n + 1) // (while_asking + 2)
        fleet.wait_for(partial(has_asked, fleet, part), f"{part} questions")
        fleet.kill(fleet.random.choice(fleet.processes))
        fleet.start()
    fleet.wait_for(partial(has_asked, fleet, races), "every question was put")
    found = fleet.rows("SELECT message_id, id FROM approvals ORDER BY message_id")
    questions = [(m, i.hex() if isinstance(i, bytes) else i.hex) for m, i in found]
    assert len({message_id for message_id, _ in questions}) == len(questions) == races

    moments = {races * n // (kills - while_asking + 1) for n in range(1, kills - while_asking + 1)}
    fleet.random.shuffle(questions)
    won: dict[str, tuple[str, str]] = {}
    with Person("anna", fleet) as anna, Person("bob", fleet) as bob:
        for n, (message_id, approval_id) in enumerate(questions):
            won[message_id] = race(fleet, anna, bob, approval_id)
            if n in moments and any(state == "approved" for _, state in won.values()):
                kill_a_busy_one(fleet)
    fleet.wait_until_final()

    report = fleet.check(replies_per_run=1)
    ends = dict(fleet.rows("SELECT message_id, status FROM queue_executions"))
    acted = Counter(effect.message_id for effect in fleet.oracle.effects())
    for message_id, (_, state) in won.items():
        assert ends[message_id] == ("succeeded" if state == "approved" else "rejected")
        assert (acted[message_id] > 0) == (state == "approved"), "what nobody allowed never ran"
    assert report.ends["task.succeeded"] == sum(s == "approved" for _, s in won.values())
    assert report.kills >= 0.8 * kills
    assert asked(fleet) == races, "nobody was asked twice"
    print(Counter(won.values()))
