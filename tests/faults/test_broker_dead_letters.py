"""Workers are killed while they import what RabbitMQ gave up: each message ends once."""

import subprocess
from collections.abc import Iterator
from functools import partial

import pytest

from tests.faults.conftest import MakeFleet
from tests.faults.harness import FINAL, Fleet
from tests.servers.rabbitmq import RabbitServer

QUEUE, DEAD = "default", "default.dead"
POLICY = "policies/%2F/faults"


@pytest.fixture
def expiring(rabbitmq: RabbitServer) -> Iterator[RabbitServer]:
    """The server, with a policy that moves every message to the dead-letter queue at once."""
    definition = {
        "message-ttl": 1,
        "dead-letter-exchange": "",
        "dead-letter-routing-key": DEAD,
    }
    policy = {"pattern": f"^{QUEUE}$", "definition": definition, "apply-to": "queues"}
    rabbitmq.api("PUT", POLICY, policy)
    rabbitmq.api("PUT", f"queues/%2F/{DEAD}", {"durable": True})
    yield rabbitmq
    rabbitmq.api("DELETE", POLICY)
    rabbitmq.forget(QUEUE, DEAD)


def importing(fleet: Fleet) -> subprocess.Popen[bytes] | None:
    """The living worker that has the role."""
    holder = fleet.one("SELECT worker_id FROM roles WHERE role LIKE 'dead letters of %'")
    pid = dict(fleet.pids()).get(holder)
    return next((each for each in fleet.processes if each.pid == pid), None)


@pytest.mark.parametrize(
    "broker",
    [
        pytest.param("rabbitmq", marks=pytest.mark.xdist_group("rabbitmq")),
        pytest.param(
            "rabbitmq+postgres", marks=[pytest.mark.xdist_group("rabbitmq"), pytest.mark.soak]
        ),
    ],
    indirect=True,
)
def test_kills_during_the_import(make_fleet: MakeFleet, expiring: RabbitServer, soak: bool) -> None:
    total, kills = (10_000, 20) if soak else (3_000, 3)
    fleet = make_fleet(QUEUES__DEFAULT__BROKER_DEAD_LETTERS=DEAD)
    fleet.send({"type": "work", "payload": {}} for _ in range(total))

    def waiting() -> int:
        return int(expiring.api("GET", f"queues/%2F/{DEAD}").get("messages", 0))

    fleet.wait_for(lambda: waiting() == total, "the server has moved all of them")
    fleet.start(2)
    cut_short = 0
    for moment in sorted(fleet.random.uniform(0, 0.9) * total for _ in range(kills)):
        fleet.wait_for(partial(fleet.has_finished, max(moment, 1)), "the import goes on")
        fleet.kill(fleet.wait_for(partial(importing, fleet), "a worker has the role"))
        cut_short += not fleet.has_finished(total)
        fleet.start()
    fleet.wait_until_final()
    fleet.wait_for(lambda: waiting() == 0, "the last batch is acknowledged")
    assert cut_short > 0
    report = fleet.check()
    assert report.ends["task.failed"] == total
    assert fleet.one("SELECT count(*) FROM dead_letters") == total
    assert fleet.one(f"SELECT count(*) FROM queue_executions WHERE status IN {FINAL}") == total
    assert not report.effects
