"""Queue and store are in one PostgreSQL database, and the server is killed under load. Its crash
takes back claims that were not synced: their messages are in the queue again."""

import time
from functools import partial

import pytest

from tests.faults.conftest import MakeFleet
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("faults-postgres")

DOWN_S = 0.7
UP_S = 2.5


@pytest.fixture
def broker() -> str:
    return "postgres"


def test_the_server_is_killed_and_stopped_under_load(
    make_fleet: MakeFleet, postgres_server: PostgresServer, soak: bool
) -> None:
    messages, outages = (8_000, 18) if soak else (1_500, 4)
    fleet = make_fleet(WORKER__SLOTS=25)
    fleet.send(
        {
            "type": "work",
            "payload": {"seconds": 0.3 * fleet.random.random(), "fail": int(n % 11 == 0)},
            "idempotency_key": f"key-{n}",
            "ordering_key": f"talk-{n % 40}" if n % 3 == 0 else None,
        }
        for n in range(messages)
        for _ in range(1 if n % 5 else 2)
    )
    fleet.start(2)
    fleet.wait_for(lambda: fleet.has_finished(20), "work has begun")
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
    report = fleet.check(replies_per_run=1)
    twins = len(range(0, messages, 5))
    assert report.ends == {"task.succeeded": messages, "task.duplicate": twins}
    assert all(process.poll() is None for process in fleet.processes), "a worker gave up"
