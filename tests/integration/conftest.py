"""The lab, in each way to put broker and store together, and the brokers that apps are tried on."""

import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ackbone.store.sqlite.migrate import ensure_schema
from tests.integration.lab import MODES, ONE_FILE, Lab
from tests.servers.rabbitmq import RabbitServer
from tests.servers.redis import RedisServer

_BROKERS = (
    "sqlite",
    "redis",
    pytest.param("rabbitmq", marks=pytest.mark.xdist_group("rabbitmq")),
)
on_each_broker = pytest.mark.parametrize("broker", _BROKERS, indirect=True)
"""What a test runs by `App()` and by commands is on this broker: the environment says so."""
on_every_broker = pytest.mark.parametrize("broker", [*_BROKERS, "postgresql"], indirect=True)
"""The same, and queue and store are in one PostgreSQL database."""


@pytest.fixture
def broker(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of the default broker. It is empty, and its store is in `home`, or in the same
    database."""
    kind = str(request.param)
    if kind == "redis":
        redis: RedisServer = request.getfixturevalue("server")
        request.getfixturevalue("client")  # empties it
        monkeypatch.setenv("ACKBONE__BROKER", redis.url)
    elif kind == "postgresql":
        monkeypatch.setenv("ACKBONE__BROKER", kind)
        monkeypatch.setenv("ACKBONE__STORE", request.getfixturevalue("postgres_url"))
    elif kind == "rabbitmq":
        rabbitmq: RabbitServer = request.getfixturevalue("rabbitmq")
        rabbitmq.forget(*rabbitmq.queues())
        monkeypatch.setenv("ACKBONE__BROKER", rabbitmq.url)
    return kind


def stored(home: Path, sql: str, *values: Any) -> list[Any]:
    """Rows of the store that the environment names, else of the file in `home`, if it is there.
    `seq` of a delivery is its rowid on SQLite."""
    url = os.environ.get("ACKBONE__STORE")
    if url is not None:
        with psycopg.connect(url, autocommit=True) as server:
            return server.execute(sql.replace("?", "%s"), values).fetchall()
    path = home / "ackbone.db"
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as conn:
        return conn.execute(sql.replace("seq", "rowid"), values).fetchall()


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
