"""Conversations: each in order, whatever fails, whoever runs it, whoever is killed meanwhile."""

import pytest

from tests.faults.conftest import MakeFleet, on_every_broker
from tests.faults.test_kill import kill_at_random

pytestmark = pytest.mark.xdist_group("faults-2")


@on_every_broker()
@pytest.mark.parametrize("kills", [0, 4], ids=["failures", "failures and kills"])
def test_order(make_fleet: MakeFleet, soak: bool, kills: int) -> None:
    """Messages of one conversation commit in the order sent; a fifth of them fails at first."""
    conversations, messages = (100, 100) if soak else (20, 30)
    fleet = make_fleet(WORKER__SLOTS=20, QUEUES__DEFAULT__ORDERED="true")
    orders = [name for name in range(conversations) for _ in range(messages)]
    pace = [0.2, 0.3, 0.5] if kills else [0, 0, 0.01, 0.05]  # work must be left for each kill
    fleet.random.shuffle(orders)  # interleaved as chats are, each in its own order
    fleet.send(
        {
            "type": "work",
            "ordering_key": f"chat-{name}",
            "payload": {
                "seconds": fleet.random.choice(pace),
                "fail": fleet.random.choice([0, 0, 0, 0, fleet.random.randint(1, 4)]),
            },
        }
        for name in orders
    )
    fleet.start(2)
    kill_at_random(fleet, kills, len(orders), last=0.4)
    fleet.wait_until_final()
    report = fleet.check(reclaim_limit_s=6.0)
    failed = report.ends.get("task.failed", 0)
    assert report.ends["task.succeeded"] + failed == len(orders)
    assert failed > 0, "four failures are one too many: some must end as dead letters"
    assert report.ends["task.succeeded"] > 0.8 * len(orders)
    retried = fleet.events("task.retried")
    workers = fleet.one(
        "SELECT count(DISTINCT worker_id) FROM event_log WHERE event_type = 'task.succeeded'"
    )
    print(f"{retried} retries, {failed} dead letters, {workers} workers")
    assert retried > 0
    assert workers >= 2, "one worker did it all: the test shows nothing"
