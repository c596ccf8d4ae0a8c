"""The lab, in each way to put broker and store together, and the brokers that apps are tried on."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ackbone.store.sqlite.migrate import ensure_schema
from tests.integration.lab import MODES, ONE_FILE, Lab
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer

on_each_broker = pytest.mark.parametrize(
    "broker",
    [
        "sqlite",
        "redis",
        pytest.param("rabbitmq", marks=pytest.mark.xdist_group("rabbitmq")),
    ],
    indirect=True,
)
"""What a test runs by `App()` and by commands is on this broker: the environment says so."""


@pytest.fixture
def broker(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of the default broker. It is empty, and its store is in `home`."""
    kind = str(request.param)
    if kind == "redis":
        redis: RedisServer = request.getfixturevalue("server")
        request.getfixturevalue("client")  # empties it
        monkeypatch.setenv("ACKBONE__BROKER", redis.url)
    elif kind == "rabbitmq":
        rabbitmq: RabbitServer = request.getfixturevalue("rabbitmq")
        rabbitmq.forget(*rabbitmq.queues())
        monkeypatch.setenv("ACKBONE__BROKER", rabbitmq.url)
    return kind


@pytest.fixture(scope="session")
def schema() -> Iterator[Path]:
    """An empty database, migrated once and copied for each test."""
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as folder:
        path = Path(folder) / "schema.db"
        ensure_schema(path)
        yield path


@pytest.fixture(params=MODES)
async def lab(request: pytest.FixtureRequest, home: Path, schema: Path) -> AsyncIterator[Lab]:
    lab = Lab(home, request.param, schema)
    yield lab
    await lab.close()


@pytest.fixture
async def one_file(home: Path, schema: Path) -> AsyncIterator[Lab]:
    """For what does not depend on where the queue is."""
    lab = Lab(home, ONE_FILE, schema)
    yield lab
    await lab.close()
