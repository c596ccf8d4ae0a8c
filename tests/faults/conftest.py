"""A fleet of worker processes with a seed that is printed, and ended with its test."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Fleet
from tests.servers.redis import RedisServer

MakeFleet = Callable[..., Fleet]

VISIBILITY_S = 2
"""Redis: how long a dead worker's entries stay with it."""
on_each_broker = pytest.mark.parametrize(
    "broker",
    ["embedded", pytest.param("redis", marks=pytest.mark.xdist_group("faults-redis"))],
    indirect=True,
)
"""Queue and store in one file; and the queue on a Redis server of its own."""


@pytest.fixture
def seed() -> int:
    """Another one each time; HOLDFAST_SEED repeats a run."""
    given = os.environ.get("HOLDFAST_SEED")
    found = int(given) if given else random.randrange(1_000_000)
    print(f"seed {found}")
    return found


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> str:
    """The broker of this test's fleets: `embedded` or `redis`."""
    return str(getattr(request, "param", "embedded"))


@pytest.fixture
def make_fleet(
    request: pytest.FixtureRequest, broker: str, home: Path, seed: int
) -> Iterator[MakeFleet]:
    fleets: list[Fleet] = []
    settings_of: dict[str, object] = {}
    if broker == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        settings_of = {
            "BROKER": f"{server.url}?visibility_timeout_s={VISIBILITY_S}",
            "TASKS__STREAM": "default",
            "TASKS__RETRY_DELAYS_S": "[0.01, 0.05, 0.1]",
        }

    def make(**settings: object) -> Fleet:
        fleets.append(Fleet(home, seed=seed, **{**settings_of, **settings}))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
