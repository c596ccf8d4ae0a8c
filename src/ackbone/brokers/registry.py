"""The broker for a URL scheme. Its driver is imported when a URL needs it."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import Protocol

from ackbone.core.broker import Broker
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import ConfigError, install_extra

_BROKERS = {
    "memory": "ackbone.brokers.memory:MemoryBroker",
    "sqlite": "ackbone.brokers.sqlite:SqliteBroker",
    "redis": "ackbone.brokers.redis:RedisBroker",
    "rediss": "ackbone.brokers.redis:RedisBroker",
    "unix": "ackbone.brokers.redis:RedisBroker",
}
_LATER = {
    "amqp": "RabbitMQ",
    "amqps": "RabbitMQ",
    "kafka": "Kafka",
    "sqs": "Amazon SQS",
    "servicebus": "Azure Service Bus",
}
"""Schemes that this version has no adapter for yet."""
_EXTRAS = {"redis": "redis"}
"""The extra that installs each driver, by the package that is imported."""
_ALIASES = {"rabbitmq": "amqp", "mem": "memory", "sqlite3": "sqlite", "inmemory": "memory"}
"""Schemes that people write for another one."""


def broker_schemes() -> tuple[str, ...]:
    """Return the URL schemes that this version has an adapter for."""
    return tuple(_BROKERS)


class Adapter(Protocol):
    """A broker's class, as the registry sees it."""

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> Broker:
        """Return a broker that is not open yet. Raises ConfigError if the URL is wrong."""
        ...


def make_broker(url: str, *, clock: Clock | None = None) -> Broker:
    """Import the adapter for `url` (`sqlite:///path`, `memory:`) and return a broker, not open yet.

    Raises ConfigError for a scheme without an adapter. The error names the scheme alone: the rest
    of a URL may hold a password.
    """
    return _adapter(url).from_url(url, clock=clock or SystemClock())


def _adapter(url: str) -> type[Adapter]:
    scheme = url.partition(":")[0].strip().lower()
    target = _BROKERS.get(scheme)
    if target is None:
        raise ConfigError([_refusal(scheme)])
    module, _, name = target.partition(":")
    try:
        adapter = importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise ConfigError([_without_driver(scheme, _EXTRAS[package])]) from None
    found: type[Adapter] = getattr(adapter, name)
    return found


def _without_driver(scheme: str, extra: str) -> str:
    return f"broker: {scheme}: its driver is missing; {install_extra(extra)}"


def _refusal(scheme: str) -> str:
    known = ", ".join(f"{name}:" for name in _BROKERS)
    if not scheme:
        return f"broker: the URL has no scheme; this version knows {known}"
    meant = scheme if scheme in _LATER else _ALIASES.get(scheme)
    if meant is None:
        close = get_close_matches(scheme, [*_BROKERS, *_LATER], n=1, cutoff=0.6)
        meant = close[0] if close else None
    if meant == scheme:
        return (
            f"broker: {scheme}: ({_LATER[scheme]}) has no adapter in this version; it knows {known}"
        )
    hint = f" Did you mean {meant}:?" if meant else ""
    if meant in _LATER:
        hint = f"{hint} ({_LATER[meant]} has no adapter in this version either.)"
    return f"broker: {scheme}: is not a scheme that this version knows ({known}).{hint}"
