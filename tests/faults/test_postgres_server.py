"""The PostgreSQL server is killed, stopped, or stands still under load: nothing is lost, all goes
on by itself."""

import time
from functools import partial

import pytest

from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("faults-postgres")

DOWN_S = 0.7
UP_S = 2.5


@pytest.fixture
def broker() -> str:
    return "redis+postgres"


def loaded(make_fleet: MakeFleet, messages: int) -> Fleet:
    """Two workers with more to do than the outages last."""
    fleet = make_fleet(WORKER__SLOTS=25)
    fleet.send(
        {
            "type": "work",
            "payload": {"seconds": 0.3 * fleet.random.random(), "fail": int(n % 11 == 0)},
            "idempotency_key": f"key-{n}",
        }
        for n in range(messages)
    )
    fleet.start(2)
    fleet.wait_for(lambda: fleet.has_finished(20), "work has begun")
    return fleet


def verdict(fleet: Fleet, messages: int) -> None:
    report = fleet.check(replies_per_run=1)
    assert report.ends["task.succeeded"] == messages
    assert all(process.poll() is None for process in fleet.processes), "a worker gave up"


def test_killed_and_stopped_every_few_seconds(
    make_fleet: MakeFleet, postgres_server: PostgresServer, soak: bool
) -> None:
    messages, outages = (8_000, 18) if soak else (2_000, 5)
    fleet = loaded(make_fleet, messages)
    for n in range(outages):
        before = fleet.finished()
        if n % 2:
            postgres_server.stop()
        else:
            postgres_server.kill()
        time.sleep(DOWN_S)  # that it is down for a while is what is tested
        postgres_server.start()
        fleet.wait_for(partial(fleet.has_finished, before + 1), "work goes on")
        time.sleep(UP_S * fleet.random.random())
    fleet.wait_until_final()
    verdict(fleet, messages)


def test_stands_still_for_longer_than_a_lease(
    make_fleet: MakeFleet, postgres_server: PostgresServer, soak: bool
) -> None:
    """Nobody could renew its lease meanwhile: nobody is reaped for that."""
    messages = 600
    fleet = loaded(make_fleet, messages)
    alive = {worker_id for worker_id, _ in fleet.pids()}
    postgres_server.pause()
    time.sleep(30 if soak else 5)  # two and a half leases
    postgres_server.go_on()
    fleet.wait_until_final()
    verdict(fleet, messages)
    died = fleet.rows("SELECT worker_id FROM workers WHERE state = 'dead'")
    print(f"{len(alive)} workers, {len(died)} declared dead")
    assert not died, "an outage of the store is nobody's death"
