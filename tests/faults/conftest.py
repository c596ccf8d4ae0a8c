"""A fleet of worker processes with a seed that is printed, and ended with its test."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Fleet
from tests.servers.postgres import PostgresServer
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer

MakeFleet = Callable[..., Fleet]

VISIBILITY_S = 2
"""A visibility timeout for tests that wait for it. The default is 300."""
_BROKERS = [
    "embedded",
    pytest.param("redis", marks=pytest.mark.xdist_group("faults-redis")),
    pytest.param("redis+postgres", marks=pytest.mark.xdist_group("faults-postgres")),
    pytest.param("postgres", marks=pytest.mark.xdist_group("faults-postgres")),
]
on_each_broker = pytest.mark.parametrize("broker", _BROKERS, indirect=True)
"""Queue and store in one file; the queue on a Redis server; the store on PostgreSQL, too; queue and
store in one PostgreSQL database."""


def on_every_broker(*, soak: bool = False) -> pytest.MarkDecorator:
    """As `on_each_broker`, and the queue on a RabbitMQ server. `soak`: that only in `make soak`, as
    it always is with the store on PostgreSQL."""
    group, full = pytest.mark.xdist_group("rabbitmq"), pytest.mark.soak
    return pytest.mark.parametrize(
        "broker",
        [
            *_BROKERS,
            pytest.param("rabbitmq", marks=[group, full] if soak else [group]),
            pytest.param("rabbitmq+postgres", marks=[group, full]),
        ],
        indirect=True,
    )


@pytest.fixture(autouse=True)
def unmeasured_workers(monkeypatch: pytest.MonkeyPatch, unmeasured: dict[str, str]) -> None:
    """Fault tests measure time and kill workers: coverage slows them down and loses its data."""
    for name in os.environ.keys() - unmeasured.keys():
        monkeypatch.delenv(name)


@pytest.fixture
def seed() -> int:
    """Another one each time; ACKBONE_SEED repeats a run."""
    given = os.environ.get("ACKBONE_SEED")
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
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> str:
    """The broker of this test's fleets, and its store if that is PostgreSQL."""
    return str(getattr(request, "param", "embedded"))


@pytest.fixture
def make_fleet(
    request: pytest.FixtureRequest, broker: str, home: Path, seed: int
) -> Iterator[MakeFleet]:
    fleets: list[Fleet] = []
    settings_of: dict[str, object] = {}
    if broker.startswith("redis"):
        server: RedisServer = request.getfixturevalue("redis_server")
        settings_of = {
            "BROKER": server.url,
            "TASKS__STREAM": "default",
            "TASKS__RETRY_DELAYS_S": "[0.01, 0.05, 0.1]",
        }

    if broker.startswith("rabbitmq"):
        rabbitmq: RabbitServer = request.getfixturevalue("rabbitmq")
        rabbitmq.forget("default")
        url = f"{rabbitmq.url}?heartbeat_s=1"  # less than the lease, as it is by default
        settings_of = {"BROKER": url, "RETRY__WAITS_S": "[0.01, 0.05, 0.1]"}
    if broker.endswith("postgres"):
        database: PostgresServer = request.getfixturevalue("postgres_server")
        settings_of["STORE"] = database.url(database.new_database())
    if broker == "postgres":
        settings_of |= {"BROKER": "postgresql", "RETRY__WAITS_S": "[0.01, 0.05, 0.1]"}

    def make(**settings: object) -> Fleet:
        fleets.append(Fleet(home, seed=seed, **{**settings_of, **settings}))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
