"""Brokers by URL scheme: lazily, with errors that help."""

import subprocess
import sys
from pathlib import Path

import pytest

from ackbone.brokers.memory import MemoryBroker
from ackbone.brokers.redis.address import Address, read_address
from ackbone.brokers.registry import broker_schemes, make_broker
from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.errors import ConfigError
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.testing import FakeClock


def test_schemes_of_this_version() -> None:
    files, servers = ("memory", "sqlite"), ("redis", "rediss", "unix", "amqp", "amqps")
    assert broker_schemes() == (*files, "postgresql", "postgres", *servers)


@pytest.mark.parametrize("url", ["memory:", "memory://", "memory", "MEMORY://x"])
def test_memory_by_any_spelling(url: str) -> None:
    assert isinstance(make_broker(url), MemoryBroker)


async def test_sqlite_by_its_file(home: Path) -> None:
    path = home / "queue.db"
    ensure_schema(path)
    clock = FakeClock()
    broker = make_broker(f"sqlite:///{path}", clock=clock)
    assert isinstance(broker, SqliteBroker)
    await broker.open()
    try:
        assert broker.file.path == path
        assert broker.file.clock is clock
    finally:
        await broker.close()


@pytest.mark.parametrize("url", ["sqlite", "sqlite:", "sqlite://", "sqlite:///"])
def test_sqlite_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="names no file"):
        make_broker(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://:secret#@host/0", r"redis: host and port cannot be read\. In a password"),
        ("redis://h/0?timeout_s=soon", r"redis: timeout_s must be a number of seconds above 0"),
        (
            "redis://h/abc",
            r"the database after the / must be a number, such as redis://host:6379/0",
        ),
        ("redis://h/0/1", r"the database after the / must be a number"),
        ("redis://h?db=abc", r"the database after the / must be a number"),
        ("unix:///run/redis.sock?db=x", r"the database after the / must be a number"),
        ("redis://h/0?visibility_timeout_s=0", r"visibility_timeout_s must be a number of seconds"),
        ("redis://h/0?timeout_s=inf", r"timeout_s must be a number of seconds above 0"),
        ("redis://h/0?delete_acked=some", r"delete_acked must be one of auto, always, never"),
        ("redis://h/0?allow_unsafe=maybe", r"allow_unsafe must be 1 or 0"),
        ("redis://h/0?visibility_timeout=5", r"did you mean visibility_timeout_s\?"),
        ("redis://h/0?protocol=3", r"unknown parameter after the \?"),
        ("amqp://guest:secret@host?timeout=5", r"amqp: unknown .* did you mean timeout_s\?"),
        ("kafka://host", r"kafka: \(Kafka\) has no adapter"),
        ("sqs://secret", r"sqs: \(Amazon SQS\) has no adapter"),
        ("servicebus://secret", r"\(Azure Service Bus\) has no adapter"),
        ("sqlit:///x", r"sqlit: is not a scheme .* Did you mean sqlite:\?"),
        ("memroy:", r"Did you mean memory:\?"),
        ("rabbitmq://u:secret@host", r"Did you mean amqp:\?"),
        ("rabbit://u:secret@host", r"Did you mean amqp:\?"),
        (
            "zzzz://secret",
            r"zzzz: is not a scheme that this version knows \(memory:, sqlite:, "
            r"postgresql:, postgres:, redis:, "
            r"rediss:, unix:, amqp:, amqps:\)\.$",
        ),
        ("://secret", r"has no scheme"),
        ("", r"has no scheme"),
    ],
)
def test_refusals_help_and_tell_no_secret(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make_broker(url)
    assert "secret" not in str(caught.value)


def test_a_redis_url_is_read_and_the_driver_gets_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISIBILITY_TIMEOUT_S", raising=False)
    plain = read_address("redis://:p%2Fw@host:6380/2")
    assert plain == Address(url="redis://:p%2Fw@host:6380/2", lease_s=300.0, timeout_s=5.0)
    given = read_address(
        "rediss://host/0?visibility_timeout_s=60&timeout_s=2.5&delete_acked=never"
        "&allow_unsafe=1&ssl_ca_certs=/etc/ca.pem"
    )
    assert given == Address(
        url="rediss://host/0?ssl_ca_certs=%2Fetc%2Fca.pem",
        lease_s=60.0,
        timeout_s=2.5,
        delete_acked="never",
        allow_unsafe=True,
    )
    monkeypatch.setenv("VISIBILITY_TIMEOUT_S", "7")
    assert read_address("redis://host").lease_s == 7.0
    assert read_address("redis://host?visibility_timeout_s=8").lease_s == 8.0


def test_every_mistake_of_a_redis_url_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_broker("redis://h/0?timeout_s=-1&delete_acked=x&allow_unsafe=2&nonsense=1")
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("password", ["4711/s3cret", "4711#s3cret", "s3cret#4711", "4711?s3cret"])
def test_a_password_that_is_not_escaped_is_no_host_and_port(password: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_address(f"redis://user:{password}@host:6379/0")
    for part in ("4711", "s3cret"):
        assert part not in str(caught.value)


WITHOUT_DRIVER = """
import sys
sys.modules[sys.argv[2]] = None  # what an installation without the extra looks like to an import
from ackbone.brokers.registry import make_broker
from ackbone.core.errors import ConfigError
make_broker("memory:")
try:
    make_broker(sys.argv[1])
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("scheme", "missing", "extra"),
    [
        ("redis", "redis", "redis"),
        ("rediss", "redis", "redis"),
        ("unix", "redis", "redis"),
        ("amqp", "aiormq", "rabbitmq"),
        ("amqp", "pamqp", "rabbitmq"),  # the adapter imports it, too: aiormq brings it
    ],
)
def test_a_missing_driver_is_named_with_what_to_install(
    scheme: str, missing: str, extra: str, unmeasured: dict[str, str]
) -> None:
    url = f"{scheme}:///secret"
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVER, url, missing],
        env=unmeasured,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert f"pip install -e '.[{extra}]'" in said
    assert f".whl[{extra}]'" in said
    assert f"broker: {scheme}:" in said
    assert "secret" not in said


def test_no_driver_is_imported_before_it_is_asked_for(unmeasured: dict[str, str]) -> None:
    program = (
        "import sys; from ackbone.brokers.registry import broker_schemes, make_broker;"
        "broker_schemes();"
        "assert not {'redis', 'sqlite3', 'ackbone.brokers.memory', 'ackbone.brokers.sqlite'}"
        " & set(sys.modules);"
        "make_broker('memory:');"
        "assert 'ackbone.brokers.memory' in sys.modules and 'sqlite3' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env=unmeasured, check=True)


OPENING = """
import asyncio, sys
from pathlib import Path
from ackbone import App, Config

def adapters():
    return {name for name in sys.modules if name.startswith("ackbone.brokers.")}

async def main():
    async with App(Config(home=Path(sys.argv[1]), broker="memory://")):
        assert adapters() == {"ackbone.brokers.registry", "ackbone.brokers.memory"}, adapters()

assert adapters() <= {"ackbone.brokers.registry"}, adapters()
asyncio.run(main())
"""


def test_an_app_imports_the_one_adapter_that_it_opens(
    home: Path, unmeasured: dict[str, str]
) -> None:
    subprocess.run([sys.executable, "-c", OPENING, home], env=unmeasured, check=True)
