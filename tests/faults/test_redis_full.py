"""A Redis at its `maxmemory` can be worked empty, whatever expired while workers were away."""

import asyncio
from contextlib import suppress

import pytest
from redis import Redis

from ackbone.core.errors import BrokerUnavailable
from tests.faults.checker import Sent
from tests.faults.conftest import VISIBILITY_S, MakeFleet
from tests.faults.harness import Fleet
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.xdist_group("faults-redis")

LIMIT = 6 * 2**20
FILLER = "x" * 100_000
BINDING = "{default}:store:cg:workers"


@pytest.fixture
def broker() -> str:
    return "redis"


async def fill(fleet: Fleet) -> None:
    """Send until the server refuses."""
    async with fleet.app() as app:
        with suppress(BrokerUnavailable):
            while True:
                message_id = f"m-{len(fleet.sent)}"
                await app.send("work", {"filler": FILLER}, id=message_id)
                fleet.sent.append(Sent(id=message_id))


def has_group(client: Redis) -> bool:
    return bool(client.exists("default") and client.xinfo_groups("default"))


@pytest.mark.parametrize("group", [True, False], ids=["a group was there", "no group yet"])
def test_a_full_server_is_worked_empty_by_workers_that_were_away(
    make_fleet: MakeFleet, redis_server: RedisServer, group: bool
) -> None:
    """Neither the group nor the key that says whose it is may need memory that is not there."""
    url = f"{redis_server.url}?visibility_timeout_s={VISIBILITY_S}"
    fleet = make_fleet(WORKER__SLOTS=20, BROKER=url)
    with Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory", LIMIT)
        if group:
            (before,) = fleet.start()
            fleet.wait_for(lambda: has_group(client), "the worker makes the group")
            assert fleet.terminate(before) == 0
            client.pexpire(BINDING, 1)  # as three leases do
            fleet.wait_for(lambda: not client.exists(BINDING), "the binding expires")
        asyncio.run(fill(fleet))
        client.config_set("maxmemory", LIMIT // 2)  # not a byte is free, whoever hangs up
        assert has_group(client) is group
        assert len(fleet.sent) > 20
        fleet.start(2)
        fleet.wait_until_final()
        fleet.wait_for(lambda: client.xlen("default") == 0, "the stream is empty")
        assert client.exists(BINDING)
    report = fleet.check(replies_per_run=1)
    assert report.ends == {"task.succeeded": len(fleet.sent)}
