"""Brokers by URL scheme: lazily, with errors that help."""

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.brokers.memory import MemoryBroker
from holdfast.brokers.registry import broker_schemes, make_broker
from holdfast.brokers.sqlite import SqliteBroker
from holdfast.core.errors import ConfigError
from holdfast.store.migrate import ensure_schema
from holdfast.testing import FakeClock


def test_schemes_of_this_version() -> None:
    assert broker_schemes() == ("memory", "sqlite")


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
        ("redis://:secret@host/0", r"redis: \(Redis Streams\) has no adapter in this version"),
        ("amqp://guest:secret@host", r"amqp: \(RabbitMQ\) has no adapter in this version"),
        ("kafka://host", r"kafka: \(Kafka\) has no adapter"),
        ("sqs://secret", r"sqs: \(Amazon SQS\) has no adapter"),
        ("servicebus://secret", r"\(Azure Service Bus\) has no adapter"),
        ("sqlit:///x", r"sqlit: is not a scheme .* Did you mean sqlite:\?"),
        ("memroy:", r"Did you mean memory:\?"),
        ("rabbitmq://u:secret@host", r"Did you mean amqp:\? \(RabbitMQ has no adapter"),
        ("zzzz://secret", r"zzzz: is not a scheme that this version knows \(memory:, sqlite:\)\.$"),
        ("://secret", r"begins with no scheme"),
        ("", r"begins with no scheme"),
    ],
)
def test_refusals_help_and_tell_no_secret(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make_broker(url)
    assert "secret" not in str(caught.value)


def test_no_driver_is_imported_before_it_is_asked_for(unmeasured: dict[str, str]) -> None:
    program = (
        "import sys; from holdfast.brokers.registry import broker_schemes, make_broker;"
        "broker_schemes();"
        "assert not {'sqlite3', 'holdfast.brokers.memory', 'holdfast.brokers.sqlite'}"
        " & set(sys.modules);"
        "make_broker('memory:');"
        "assert 'holdfast.brokers.memory' in sys.modules and 'sqlite3' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env=unmeasured, check=True)


OPENING = """
import asyncio, sys
from pathlib import Path
from holdfast import App, Config

def adapters():
    return {name for name in sys.modules if name.startswith("holdfast.brokers.")}

async def main():
    async with App(Config(home=Path(sys.argv[1]), broker="memory://")):
        assert adapters() == {"holdfast.brokers.registry", "holdfast.brokers.memory"}, adapters()

assert adapters() <= {"holdfast.brokers.registry"}, adapters()
asyncio.run(main())
"""


def test_an_app_imports_the_one_adapter_that_it_opens(
    home: Path, unmeasured: dict[str, str]
) -> None:
    subprocess.run([sys.executable, "-c", OPENING, home], env=unmeasured, check=True)
