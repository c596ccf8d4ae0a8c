"""What every test may ask for."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.servers.postgres import (
    OUTSIDE_URL,
    OutsidePostgres,
    PostgresServer,
    postgres_server,
)
from tests.servers.rabbitmq import NEWEST, RabbitServer
from tests.servers.redis import RedisServer

# A shell that starts us in the background has Ctrl+C ignored, and commands that are started here
# would inherit that; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SOAK = os.environ.get("ACKBONE_SOAK", "") not in ("", "0")
ALLOWANCE = 1 if SOAK else 3
"""Times a promised figure: every run is allowed more than the one that measures it."""

# A shared machine decides how long an example takes, so time is no reason to fail one.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", _UNTIMED, max_examples=100)
settings.register_profile("soak", _UNTIMED, max_examples=2000)
settings.load_profile("soak" if SOAK else "ci")


@pytest.fixture
def unmeasured() -> dict[str, str]:
    """The environment of a process whose imports are looked at: coverage brings its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


@pytest.fixture(scope="session")
def soak() -> bool:
    """True under `make soak`: use the full counts instead of the CI ones."""
    return SOAK


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty ACKBONE_HOME of this test alone.

    The path is short on purpose: a worker binds a socket below it, and a socket's path ends at
    108 bytes, which pytest's own tmp_path can exceed.
    """
    path = Path(tempfile.mkdtemp(prefix="ab-", dir="/tmp"))
    monkeypatch.setenv("ACKBONE_HOME", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module", name="server")
def redis_server() -> Iterator[RedisServer]:
    """A private Redis of one module."""
    server = RedisServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture(name="client")
def redis_client(server: RedisServer) -> Iterator[Any]:
    """A plain client, which knows Redis and nothing of us; the server is empty and has room."""
    from redis import Redis

    client: Any = Redis.from_url(server.url)
    client.flushall()
    client.config_set("maxmemory", 0)
    yield client
    client.config_set("maxmemory", 0)
    client.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer | OutsidePostgres]:
    """One PostgreSQL for all tests that want a database and do no harm to the server."""
    server = postgres_server()
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def own_postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A PostgreSQL of ours, for tests that make roles: those are the whole server's."""
    if not OUTSIDE_URL:
        yield request.getfixturevalue("postgres")
        return
    server = PostgresServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer | OutsidePostgres) -> Iterator[str]:
    """A database with our tables and no rows, to be copied."""
    from ackbone.store.postgres.migrate import ensure_schema

    name = postgres.new_database()
    ensure_schema(postgres.url(name))
    yield name
    postgres.drop(name)


@pytest.fixture
def postgres_url(
    postgres: PostgresServer | OutsidePostgres, postgres_template: str
) -> Iterator[str]:
    """An empty database of this test alone, with our tables."""
    name = postgres.new_database(template=postgres_template)
    yield postgres.url(name)
    postgres.drop(name)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitServer]:
    """One RabbitMQ for all tests that do no harm to it; they are of the xdist group `rabbitmq`."""
    server = RabbitServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def newest_rabbitmq() -> Iterator[RabbitServer]:
    """As `rabbitmq`, and newer than what Debian's stable release has."""
    server = RabbitServer(NEWEST)
    server.start()
    yield server
    server.remove()
