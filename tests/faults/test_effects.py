"""A kill between an external effect and its commit: never twice, unless the policy says so."""

from collections import Counter

import pytest

from tests.faults.conftest import MakeFleet
from tests.faults.oracle import times

pytestmark = pytest.mark.xdist_group("faults-2")

POLICIES = ("park", "again", "skip")
MOMENTS = ("before", "inside", "after")


def test_effect_guard(make_fleet: MakeFleet, soak: bool) -> None:
    """Each message kills its worker once or twice: before its effect, inside it or after it."""
    kills = 200 if soak else 20
    fleet = make_fleet(WORKER__SLOTS=1)  # a kill hits nobody but the message that asked for it
    plans: dict[str, tuple[str, str, int]] = {}
    planned = 0
    while planned < kills:
        n = len(plans)
        plan = (POLICIES[n % 3], MOMENTS[n // 3 % 3], 2 if n % 4 == 3 else 1)
        plans[f"m-{n}"] = plan
        # Parked after its first kill, or done with it: the second one never comes.
        planned += plan[2] if plan[:2] == ("again", "inside") or plan[1] == "after" else 1
    messages = [
        {
            "type": "effect",
            "id": message_id,
            "payload": {"policy": policy, "at": moment, "kills": count},
        }
        for message_id, (policy, moment, count) in plans.items()
    ]
    messages += [
        {
            "type": "effect",
            "id": f"good-{n}",
            "payload": {"policy": "park", "at": "after", "kills": 0},
        }
        for n in range(20)
    ]
    fleet.random.shuffle(messages)
    fleet.start(2)  # before anything is sent: what they run may kill them at once
    fleet.send(messages)
    parked = {i for i, (policy, moment, _) in plans.items() if (policy, moment) in UNKNOWN}
    fleet.wait_until_final(parked=len(parked), meanwhile=fleet.replace_the_dead)
    report = fleet.check(replies_per_run=1, may_park=parked, may_be_hollow=plans)
    seen = times(fleet.oracle.effects())
    happened = Counter({m: seen.get(f"{m}:charge", 0) for m in [*plans, *GOOD]})
    for message_id, (policy, moment, count) in plans.items():
        wanted = expected(policy, moment, count)
        assert happened[message_id] == wanted, (message_id, policy, moment, count, report.table())
        assert (fleet.status(message_id) == "parked") is (message_id in parked)
    assert all(happened[f"good-{n}"] == 1 for n in range(20))
    reclaims = fleet.events("task.lost")
    print(f"{reclaims} kills, {len(parked)} parked, {sum(happened.values())} effects")
    assert reclaims >= kills


GOOD = [f"good-{n}" for n in range(20)]
UNKNOWN = {("park", "before"), ("park", "inside")}
"""Begun, not recorded: nobody knows, and a person is asked."""


def expected(policy: str, moment: str, kills: int) -> int:
    """How often the effect happens over all attempts."""
    match moment:
        case "after":
            return 1  # recorded: every later attempt gets the recorded result
        case "inside":
            return 1 + kills if policy == "again" else 1  # only a policy repeats it
        case _:
            return 1 if policy == "again" else 0  # killed before it acted: nobody can know that
