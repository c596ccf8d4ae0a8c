"""The kinds of brokers: one entry for each adapter, read by configuration, help and error messages.

An adapter's driver is imported when a URL needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Protocol

import msgspec

from ackbone.core.broker import Broker
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import ConfigError, install_extra


class BrokerKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of broker."""

    name: str
    title: str
    """For people."""
    schemes: tuple[str, ...]
    """URL schemes. The first one is the usual one."""
    example: str
    """A URL as users write it."""
    adapter: str = ""
    """Module and class of the adapter. Empty: a later version will have one."""
    extra: str | None = None
    """The extra that installs the driver."""
    is_server: bool = True
    """The broker is a server of its own, which may be unreachable. False: it is in this process, or
    in the store's database."""
    gives_up: bool = False
    """The server moves messages to dead-letter queues by itself (role `DeadLetters`)."""
    trigger_types: tuple[str, ...] = ()
    """Names of the kind in `adapter.type` of a trigger. Without any: its own name."""
    misspelled: tuple[str, ...] = ()
    """Schemes that people write instead."""
    varies: Mapping[str, str] = {}
    """The capabilities that depend on the server or on the URL, and on what there."""

    @property
    def types(self) -> tuple[str, ...]:
        return self.trigger_types or (self.name,)


KINDS = (
    BrokerKind(
        name="memory",
        title="memory",
        schemes=("memory",),
        example="memory://",
        adapter="ackbone.brokers.memory:MemoryBroker",
        is_server=False,
        trigger_types=("mock", "memory"),
        misspelled=("mem", "inmemory"),
    ),
    BrokerKind(
        name="sqlite",
        title="SQLite",
        schemes=("sqlite",),
        example="sqlite:///path/to/file.db",
        adapter="ackbone.brokers.sqlite:SqliteBroker",
        is_server=False,
        misspelled=("sqlite3",),
    ),
    BrokerKind(
        name="postgresql",
        title="PostgreSQL",
        schemes=("postgresql", "postgres"),
        example="postgresql://user@host:5432/name",
        adapter="ackbone.brokers.postgres:PostgresBroker",
        extra="postgres",
        is_server=False,
        misspelled=("pg", "psql", "pgsql"),
        varies={"lease_s": "none in a worker, where receiving a message is claiming it"},
    ),
    BrokerKind(
        name="redis",
        title="Redis",
        schemes=("redis", "rediss", "unix"),
        example="redis://host:6379/0",
        adapter="ackbone.brokers.redis:RedisBroker",
        extra="redis",
        varies={
            "durability": "`fsync` with `appendfsync always`; `none` without an append-only file",
            "lease_s": "`visibility_timeout_s` in the URL, else `tasks.visibility_timeout_s`",
        },
    ),
    BrokerKind(
        name="rabbitmq",
        title="RabbitMQ",
        schemes=("amqp", "amqps"),
        example="amqp://user@host:5672/vhost",
        adapter="ackbone.brokers.rabbitmq:RabbitBroker",
        extra="rabbitmq",
        gives_up=True,
        misspelled=("rabbitmq", "rabbit"),
        varies={
            "hold_limit_s": "`hold_limit_s` in the URL",
            "max_body": "64 MiB before RabbitMQ 4.0",
        },
    ),
    BrokerKind(name="kafka", title="Kafka", schemes=("kafka",), example="kafka://host:9092"),
    BrokerKind(name="sqs", title="Amazon SQS", schemes=("sqs",), example="sqs://region"),
    BrokerKind(
        name="servicebus",
        title="Azure Service Bus",
        schemes=("servicebus",),
        example="servicebus://namespace",
    ),
)
BY_SCHEME = {scheme: kind for kind in KINDS for scheme in kind.schemes}
_INSTEAD = {name: kind.schemes[0] for kind in KINDS for name in kind.misspelled}


class Adapter(Protocol):
    """A broker's class, as the registry sees it."""

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> Broker:
        """Return a broker that is not open yet. Raises ConfigError if the URL is wrong."""
        ...


def broker_schemes() -> tuple[str, ...]:
    """Return the URL schemes that this version has an adapter for."""
    return tuple(scheme for scheme, kind in BY_SCHEME.items() if kind.adapter)


def kind_of(url: str) -> BrokerKind:
    """Return the kind of broker that a URL names.

    Raises ConfigError for a scheme without an adapter. The error names the scheme alone: the rest
    of a URL may hold a password.
    """
    scheme = url.partition(":")[0].strip().lower()
    kind = BY_SCHEME.get(scheme)
    if kind is None or not kind.adapter:
        raise ConfigError([f"broker: {_refusal(scheme)}"])
    return kind


def kind_of_trigger(adapter_type: str) -> BrokerKind:
    """Return the kind of broker behind `adapter.type` of a trigger.

    Raises ConfigError for a type that this version has no adapter for.
    """
    kind = next((each for each in KINDS if adapter_type in each.types), None)
    if kind is not None and kind.adapter:
        return kind
    known = ", ".join(name for each in KINDS if each.adapter for name in each.types)
    title = adapter_type if kind is None else kind.title
    raise ConfigError([f"adapter.type: {title} has no adapter in this version; it has: {known}"])


def trigger_types() -> tuple[str, ...]:
    """Return the names that `adapter.type` may have, also those of later versions."""
    return tuple(name for kind in KINDS for name in kind.types)


def make_broker(url: str, *, clock: Clock | None = None) -> Broker:
    """Import the adapter for `url` (`sqlite:///path`, `memory:`) and return a broker, not open yet.

    Raises ConfigError for a scheme without an adapter, a missing driver and a wrong URL.
    """
    kind = kind_of(url)
    module, _, name = kind.adapter.partition(":")
    try:
        adapter: type[Adapter] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        # The adapter imports the driver, and packages that the driver brings.
        if kind.extra is None or (error.name or "").partition(".")[0] == "ackbone":
            raise
        scheme, how = url.partition(":")[0], install_extra(kind.extra)
        raise ConfigError([f"broker: {scheme}: its driver is missing; {how}"]) from None
    return adapter.from_url(url, clock=clock or SystemClock())


def meant(scheme: str) -> str | None:
    """Return the scheme that was probably meant instead of this unknown one."""
    close = get_close_matches(scheme, [*BY_SCHEME], n=1, cutoff=0.6)
    return _INSTEAD.get(scheme) or (close[0] if close else None)


def _refusal(scheme: str) -> str:
    known = ", ".join(f"{name}:" for name in broker_schemes())
    if not scheme:
        return f"the URL has no scheme; this version knows {known}"
    if scheme in BY_SCHEME:
        title = BY_SCHEME[scheme].title
        return f"{scheme}: ({title}) has no adapter in this version; it knows {known}"
    near = meant(scheme)
    hint = f" Did you mean {near}:?" if near else ""
    if near and not BY_SCHEME[near].adapter:
        hint += f" ({BY_SCHEME[near].title} has no adapter in this version either.)"
    return f"{scheme}: is not a scheme that this version knows ({known}).{hint}"
