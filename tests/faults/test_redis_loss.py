"""Redis loses its data while the worker that ran its messages dies: nobody is left in the dark."""

from pathlib import Path

import pytest
from redis import Redis

from tests.faults.conftest import VISIBILITY_S, MakeFleet
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.xdist_group("faults-redis")

MANY = 20


@pytest.mark.parametrize("broker", ["redis", "redis+postgres"], indirect=True)
def test_messages_that_redis_lost_are_dead_letters_and_others_go_on(
    make_fleet: MakeFleet, redis_server: RedisServer, home: Path
) -> None:
    url = f"{redis_server.url}?visibility_timeout_s={VISIBILITY_S}"
    fleet = make_fleet(WORKER__SLOTS=MANY, WORKER__COPY_LOST_AFTER_S=1, BROKER=url)
    (victim,) = fleet.start()
    until = {"until": str(home / "never")}
    fleet.send([{"type": "late", "payload": until, "id": f"lost-{n}"} for n in range(MANY)])
    ids = [f"lost-{n}" for n in range(MANY)]
    fleet.wait_for(lambda: fleet.are_running(ids), "all of them run")
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
    fleet.kill(victim)
    fleet.send([{"type": "work", "payload": {}, "id": "after"}])
    fleet.start()
    lost = "SELECT count(*) FROM dead_letters WHERE reason = 'copy_lost' AND state = 'open'"
    fleet.wait_for(lambda: fleet.one(lost) == MANY, "what Redis lost is dead-lettered")
    fleet.wait_until_final()
    assert fleet.status("after") == "succeeded"
    assert {fleet.status(each) for each in ids} == {"failed"}
    logs = "".join(path.read_text() for path in home.glob("worker-*.log"))
    assert "ackbone dlq list --reason copy_lost" in logs
