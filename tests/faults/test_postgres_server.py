"""The PostgreSQL server is killed, stopped, or stands still under load: nothing is lost, all goes
on by itself."""

import time
from functools import partial
from typing import Any, NamedTuple

import pytest
from redis import Redis

from tests.faults.checker import Sent
from tests.faults.conftest import MakeFleet
from tests.faults.harness import Fleet
from tests.faults.oracle import times
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.xdist_group("faults-postgres")

DOWN_S = 0.7
UP_S = 2.5


@pytest.fixture
def broker() -> str:
    return "redis+postgres"


PARTS = 10


class Load(NamedTuple):
    """What a fleet has to do: runs, and much that is acknowledged at its claim."""

    fleet: Fleet
    messages: int
    """Each with a key of its own; every fifth is followed by a twin with the same one."""

    @property
    def twins(self) -> int:
        return len(range(0, self.messages, 5))

    @property
    def broken(self) -> int:
        """Entries that are no messages, spread among the others."""
        return self.messages // 10

    def send(self, redis_url: str) -> None:
        fleet, random = self.fleet, self.fleet.random
        all_of_them = [
            {
                "type": "work",
                "payload": {"seconds": 0.3 * random.random(), "fail": int(n % 11 == 0)},
                "idempotency_key": f"key-{n}",
            }
            for n in range(self.messages)
            for _ in range(1 if n % 5 else 2)
        ]
        with Redis.from_url(redis_url) as client:
            for part in range(PARTS):
                fleet.send(all_of_them[part::PARTS])
                for n in range(part, self.broken, PARTS):
                    entry: Any = client.xadd("default", {"broken": n})
                    fleet.sent.append(Sent(id=f"default/{entry.decode()}"))


def loaded(make_fleet: MakeFleet, redis_server: RedisServer, messages: int) -> Load:
    """Two workers with more to do than the outages last."""
    load = Load(make_fleet(WORKER__SLOTS=25), messages)
    load.send(redis_server.url)
    load.fleet.start(2)
    load.fleet.wait_for(lambda: load.fleet.has_finished(20), "work has begun")
    return load


def verdict(load: Load) -> None:
    fleet = load.fleet
    report = fleet.check(replies_per_run=1)
    assert report.ends == {
        "task.succeeded": load.messages,
        "task.duplicate": load.twins,
        "task.failed": load.broken,
    }
    assert all(process.poll() is None for process in fleet.processes), "a worker gave up"


def test_killed_and_stopped_every_few_seconds(
    make_fleet: MakeFleet,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    soak: bool,
) -> None:
    messages, outages = (8_000, 18) if soak else (2_000, 5)
    load = loaded(make_fleet, redis_server, messages)
    fleet = load.fleet
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
    verdict(load)


def test_effects_outlive_outages(
    make_fleet: MakeFleet, postgres_server: PostgresServer, soak: bool
) -> None:
    """Nobody is killed but the server: every result of `ctx.once` is in somebody's hands, so no
    message is parked for it. An outage is no failure of the handler, which has no retry here: no
    breaker opens, and what ran goes on within seconds."""
    messages, outages = (600, 10) if soak else (120, 3)
    fleet = make_fleet(WORKER__SLOTS=20, BREAKER__FAILURES=3, BREAKER__PROBE_S=3600)
    payload = {"steps": 8, "pause": 0.15}
    fleet.send({"type": "steps", "payload": payload} for _ in range(messages))
    fleet.start(2)
    fleet.wait_for(lambda: fleet.has_finished(5), "work has begun")
    for n in range(outages):
        before = fleet.finished()
        postgres_server.kill()
        time.sleep(3.0 if n == 0 else DOWN_S)  # that it is down for a while is what is tested
        postgres_server.start()
        back = time.monotonic()
        fleet.wait_for(partial(fleet.has_finished, before + 5), "runs end again")
        print(f"outage {n}: runs ended {time.monotonic() - back:.1f} s after it")
        assert time.monotonic() - back < 15, "they waited for something else than the server"
    fleet.wait_until_final()
    found = dict(fleet.rows("SELECT status, count(*) FROM queue_executions GROUP BY 1"))
    assert found == {"succeeded": messages}
    assert fleet.rows("SELECT worker_id FROM workers WHERE state = 'dead'") == []
    done = times(fleet.oracle.effects())
    assert len(done) == messages * payload["steps"]
    assert set(done.values()) == {1}, "an effect happened twice"


def test_stands_still_for_longer_than_a_lease(
    make_fleet: MakeFleet,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    soak: bool,
) -> None:
    """Nobody could renew its lease meanwhile: nobody is reaped for that."""
    messages = 600
    load = loaded(make_fleet, redis_server, messages)
    fleet = load.fleet
    alive = {worker_id for worker_id, _ in fleet.pids()}
    postgres_server.pause()
    time.sleep(30 if soak else 5)  # two and a half leases
    postgres_server.go_on()
    fleet.wait_until_final()
    verdict(load)
    died = fleet.rows("SELECT worker_id FROM workers WHERE state = 'dead'")
    print(f"{len(alive)} workers, {len(died)} declared dead")
    assert not died, "an outage of the store is nobody's death"
