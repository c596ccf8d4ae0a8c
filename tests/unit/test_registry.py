"""Brokers by URL scheme: lazily, with errors that help."""

import subprocess
import sys

import pytest

from holdfast.brokers.memory import MemoryBroker
from holdfast.brokers.registry import broker_class, broker_schemes
from holdfast.core.errors import ConfigError


def test_schemes_of_this_version() -> None:
    assert broker_schemes() == ("memory", "sqlite")


@pytest.mark.parametrize("url", ["memory:", "memory://", "memory", "MEMORY://x"])
def test_memory_by_any_spelling(url: str) -> None:
    assert broker_class(url) is MemoryBroker


@pytest.mark.parametrize("scheme", broker_schemes())
def test_each_scheme_has_its_class(scheme: str) -> None:
    assert hasattr(broker_class(f"{scheme}:///somewhere"), "publish")


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
        broker_class(url)
    assert "secret" not in str(caught.value)


def test_no_driver_is_imported_before_it_is_asked_for(unmeasured: dict[str, str]) -> None:
    program = (
        "import sys; from holdfast.brokers.registry import broker_class, broker_schemes;"
        "broker_schemes();"
        "assert not {'sqlite3', 'holdfast.brokers.memory', 'holdfast.brokers.sqlite'}"
        " & set(sys.modules);"
        "broker_class('memory:');"
        "assert 'holdfast.brokers.memory' in sys.modules and 'sqlite3' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env=unmeasured, check=True)
