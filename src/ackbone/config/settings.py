"""The settings, with their defaults and ranges. This file is the reference of `ackbone.yaml`.

Times are seconds and end in `_s`, sizes are bytes and end in `_bytes`. A relative path in the file
is relative to the file's folder; one from a variable or an argument, to the current folder.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ackbone.brokers.registry import BrokerKind, kind_of, kind_of_trigger
from ackbone.core.broker import Subscription
from ackbone.core.errors import ConfigError
from ackbone.core.retry import RetryPolicy
from ackbone.core.secret import MASK, Secret, is_secret_name, mask_value
from ackbone.triggers.config import QueueTriggerConfig

from .endpoints import STORES, Endpoint, endpoint, parameter, sqlite_file, with_default
from .nodes import join
from .queues import YEAR, Days, Queue, Retry, Span, Time
from .tasks import Tasks


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process."""

    slots: Annotated[int, Meta(ge=1, le=100_000)] = 100
    """Concurrent runs per queue."""
    lease_s: Annotated[float, Meta(ge=0.5, le=86_400)] = 10.0
    """A worker without a sign of life for this long is dead; renewed after a third of it."""
    crash_budget: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Unexplained ends (SIGKILL) of a process that ran one message alone, before the message is a
    dead letter. An exit code or another signal is an explanation: the first one ends it."""
    shutdown_timeout_s: Time = 30.0
    """How long runs may continue after a stop; then their messages are released."""
    stall_limit_s: Span = 60.0
    """The lease is not renewed while the event loop is blocked for longer than this."""
    recycle_grace_s: Time = 10.0
    """The worker restarts if a handler runs this long beyond its timeout, or the loop is blocked
    this long beyond `stall_limit_s`."""
    isolated: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Child processes for handlers with isolation "process"; null: one per CPU, at most `slots`."""
    solo_children: Annotated[int, Meta(ge=1, le=1000)] = 16
    """Concurrent child processes for suspects: messages that crashed their workers."""
    copy_lost_after_s: Span = 3600.0
    """A message that no worker runs and whose copy the broker has lost is dead-lettered after this
    many seconds (`copy_lost`). At least twice the broker's visibility timeout counts."""
    guard_timeout_s: Span = 10.0
    """A guard that does not answer within this time has failed."""


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """When a handler or channel counts as down."""

    failures: Annotated[int, Meta(ge=1, le=1_000_000)] = 5
    """After this many failures in a row, only one message at a time is tried."""
    probe_s: Span = 30.0
    """Seconds between these tries."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Deliveries of replies."""

    calls: Annotated[int, Meta(ge=1, le=10_000)] = 200
    """Concurrent calls of one process."""
    timeout_s: Span = 60.0
    """A call without an answer is given up after this time; the reply may have arrived."""
    wait_scale: Annotated[float, Meta(ge=0.0, le=1000.0)] = 1.0
    """Multiplies the waits between attempts (5 s, 25 s, 2 min, 10 min, 10 min), but not a wait that
    the other side asked for (`Retry-After`)."""
    on_unknown: Literal["resend", "hold"] = "resend"
    """A reply that may have arrived: resend it, marked, or hold it until an operator decides."""
    tenant_per_minute: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Calls for one tenant per minute, over all channels and processes."""


ChannelKind = Literal["telegram", "discord", "slack", "email", "webhook", "apprise", "folder"]


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `channels`: a way for replies to leave."""

    kind: ChannelKind | None = None
    """Null: the name of the entry."""
    connection: dict[str, Any] = {}
    """Arguments of the channel: a token, webhooks, a host; secrets in it are `Secret`s."""
    timeout_s: Span | None = None
    """Null: that of `delivery`."""
    on_unknown: Literal["resend", "hold"] | None = None
    """Null: that of `delivery`."""


class Subscriber(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `subscribers`: an address that is notified about events."""

    channel: str = "webhook"
    """The name of a channel."""
    to: str = ""
    """The recipient: a URL, a chat, an address."""
    events: tuple[str, ...] = ("delivery.*",)
    """Event types; `*` matches any text."""
    tenant: str | None = None
    """Null: all tenants."""
    form: Literal["json", "text"] | None = None
    """Null: json for a webhook, a line of text for others."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Days for which finished records are kept; null: for ever."""

    tasks_days: Days | None = 30.0
    events_days: Days | None = None
    metrics_days: Days | None = 30.0
    deliveries_days: Days | None = 30.0
    dead_letters_days: Days | None = None


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The chained event log and the anchors that prove it."""

    anchor_interval_s: Span = 60.0
    key_file: Path | None = None
    """File with the key of the anchors, outside the database; null: `<home>/ledger.key`."""
    anchor_file: Path | None = None
    """Null: `<home>/ledger.anchors`."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Rows in `queue_metrics`."""

    enabled: bool = True
    export_interval_s: Span = 60.0


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """Logging to standard error."""

    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    format: Literal["auto", "json", "text"] = "auto"
    """auto: text on a terminal, else JSON lines."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """The broker of a trigger's messages."""

    type: str | None = None
    """Null: the broker of this file. mock is the memory broker."""
    connection: dict[str, Any] = {}
    """Arguments of the adapter; secrets in it are `Secret`s."""

    def url(self, usual: BrokerKind) -> str | None:
        """Return the URL of a broker of its own. None: the queue is on the broker of the file,
        which is of the kind `usual`.

        Raises ConfigError if that broker is not known, or not in this version. Such a trigger can
        be loaded and not started.
        """
        if self.type is None:
            if self.connection:
                raise ConfigError(["adapter.connection is not used without adapter.type"])
            return None
        kind, url = kind_of_trigger(self.type), self.connection.get("url")
        if url is not None and list(self.connection) == ["url"]:
            return url.reveal() if isinstance(url, Secret) else str(url)
        if kind == usual and not (kind.is_server and self.connection):
            return None
        if kind.name == "memory":
            raise ConfigError(
                [
                    f"adapter.type {self.type} is the memory broker, but `broker` is {usual.name}. "
                    "Write `broker: memory://` (messages are then gone when the process ends), or "
                    "leave the type out"
                ]
            )
        if not kind.is_server and not self.connection:
            return kind.name
        raise ConfigError(
            [
                f"adapter.type {self.type} needs the address of its server and nothing else: write "
                f'adapter.connection: {{url: "{kind.example}"}}'
            ]
        )


class TriggerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one trigger."""

    enabled: bool = True
    """Whether the queue has rows in `queue_metrics`."""
    export_interval: Span | None = None
    """Seconds; null: as `metrics.export_interval_s`."""


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `triggers`: the fields of `QueueTriggerConfig`, its adapter and its metrics."""

    queue_name: str = ""
    consumer_group: str = ""
    concurrency: int = 1
    ack_policy: str = "ack"
    max_retries: int = 3
    retry_backoff_base: float = 1.0
    retry_backoff_multiplier: float = 2.0
    idempotency_window: int = 3600
    enable_dedup: bool = True
    parser_type: str = "json"
    event_name_header: str = "x-event-name"
    focus: str | None = None
    adapter: Adapter = Adapter()
    metrics: TriggerMetrics = TriggerMetrics()

    def queue(self) -> Queue:
        """Return the settings of the trigger's queue."""
        return Queue(
            codec=self.parser_type,
            ack_policy=self.ack_policy,  # type: ignore[arg-type] # checked when it was loaded
            dedup=self.enable_dedup,
            dedup_window_s=float(self.idempotency_window),
            max_retries=self.max_retries,
            base_delay_s=self.retry_backoff_base,
            max_delay_s=float(YEAR),
            backoff_factor=self.retry_backoff_multiplier,
            jitter=0.0,
        )

    @property
    def metrics_enabled(self) -> bool:
        return self.metrics.enabled

    @property
    def metrics_export_interval(self) -> float | None:
        return self.metrics.export_interval

    def queue_trigger(self) -> QueueTriggerConfig:
        """Return the configuration for `QueueTrigger`."""
        fields = QueueTriggerConfig.__dataclass_fields__
        return QueueTriggerConfig(**{name: getattr(self, name) for name in fields})


DEFAULT = "default"
"""The broker of queues that name none."""
DEFAULT_QUEUE = "default"


class Setting(NamedTuple):
    """One row of `Config.describe()`."""

    path: str
    value: Any
    """Plain, with secrets masked."""
    origin: str
    """default, file, env or argument."""


class Config(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All settings. `load_config` makes it; `Config()` is the defaults.

    A Config built in Python is checked as the file is: `Config(home="data", worker={"slots": 5})`
    is converted, and a wrong value raises ConfigError.
    """

    home: Path = Path(".ackbone")
    """Folder of all files that ackbone writes."""
    broker: str = "sqlite"
    """The broker that is called `default`: `sqlite` (in `home`), `sqlite:///path`, `postgresql`
    (the store's database),
    `redis://host:6379/0` or `memory://`."""
    brokers: dict[str, str] = {}
    """More brokers, by the names that queues use: `{events: "redis://host:6379/0"}`."""
    store: str = "sqlite"
    """`sqlite` (the broker's file, else in `home`), `sqlite:///path` or `postgresql://user@host/name`."""
    worker: Worker = Worker()
    queues: dict[str, Queue] = {}
    default_queue: str = DEFAULT_QUEUE
    """The queue of handlers and messages that name none. `stream:task` chooses the task
    protocol."""
    tasks: Tasks = Tasks()
    retry: Retry = Retry()
    breaker: Breaker = Breaker()
    delivery: Delivery = Delivery()
    channels: dict[str, Channel] = {}
    subscribers: dict[str, Subscriber] = {}
    max_message_bytes: Annotated[int, Meta(ge=1024, le=67_108_864)] = 262_144
    """Largest size of one encoded message, in bytes."""
    send_timeout_s: Span = 5.0
    retention: Retention = Retention()
    ledger: Ledger = Ledger()
    metrics: Metrics = Metrics()
    rules: Path | None = None
    """The rules file, which is applied before each run; null: no rules."""
    on_dedup_unavailable: Literal["stop", "continue"] = "stop"
    """While the `idempotency_store` of a trigger cannot be asked. stop: messages wait for it;
    continue: they run without dedup, which switches off the promise of one run per key."""
    log: Log = Log()
    triggers: tuple[Trigger, ...] = ()
    file: Path | None = None
    """The file that was read. This is not a setting."""
    origins: Mapping[str, str] = {}
    """The origin of each value that is not a default. This is not a setting."""

    def __post_init__(self) -> None:
        from .load import checked

        for name, value in checked(self).items():
            msgspec.structs.force_setattr(self, name, value)

    @functools.cached_property
    def endpoints(self) -> dict[str, Endpoint]:
        """All brokers by name, that of each trigger with an adapter of its own among them."""
        own = self.home / "ackbone.db"
        usual = endpoint(
            DEFAULT, self.broker, file=sqlite_file(self.store) or own, store=self.store
        )
        found = {DEFAULT: usual._replace(url=self._completed(usual.url))}
        urls = dict(self.brokers)
        for trigger in self.triggers:
            with contextlib.suppress(ConfigError):  # `check_triggers` reports it
                url = trigger.adapter.url(usual.kind)
                if url is not None and url not in (self.broker, *self.brokers.values()):
                    urls[f"trigger {trigger.queue_name}"] = url
        for name, url in urls.items():
            found[name] = endpoint(name, self._completed(url), file=own, store=self.store)
        return found

    def _completed(self, url: str) -> str:
        """Return the URL with the values that other settings add to it."""
        timeout_s = self.tasks.visibility_timeout_s
        if timeout_s is None or kind_of(url).name != "redis":
            return url
        return with_default(url, "visibility_timeout_s", f"{timeout_s:g}")

    def endpoint(self, queue: str) -> Endpoint:
        """Return the broker that the queue lives on."""
        return self.endpoints[self._places.get(queue, DEFAULT)]

    @functools.cached_property
    def _places(self) -> dict[str, str]:
        """The brokers of queues that are not on the default one. Results and copies of dead letters
        are on the broker of the queue that they come from."""
        found: dict[str, str] = {}
        usual = self.endpoints[DEFAULT].kind
        for trigger in self.triggers:
            with contextlib.suppress(ConfigError):
                url = trigger.adapter.url(usual)
                names = (name for name, known in self.brokers.items() if known == url)
                name = next(names, f"trigger {trigger.queue_name}")
                if name in self.endpoints:
                    found[trigger.queue_name] = name
        placed = {name: each.broker for name, each in self.queues.items() if each.broker}
        for name, broker in placed.items():
            notices = self.queue(name).notices
            for to in (notices.results, notices.dead_letters) if notices else ():
                if to is not None:
                    found[to] = broker
        return found | placed

    @property
    def has_server(self) -> bool:
        """Whether a broker is a server, which may be unreachable."""
        return any(each.kind.is_server for each in self.endpoints.values())

    @property
    def broker_files(self) -> list[Path]:
        """The SQLite files of brokers."""
        files = [each.file for each in self.endpoints.values() if each.file is not None]
        return list(dict.fromkeys(files))

    @property
    def store_kind(self) -> str:
        """`sqlite`, or the server behind the URL."""
        scheme = self.store.partition(":")[0]
        return STORES.get(scheme, scheme)

    @property
    def store_file(self) -> Path:
        """The SQLite file of the store, if `store_kind` is sqlite."""
        return sqlite_file(self.store) or self.endpoints[DEFAULT].file or self.home / "ackbone.db"

    @property
    def ledger_key_file(self) -> Path:
        return self.ledger.key_file or self.home / "ledger.key"

    @property
    def ledger_anchor_file(self) -> Path:
        return self.ledger.anchor_file or self.home / "ledger.anchors"

    def queue(self, name: str) -> Queue:
        """Return the settings of a queue, from `queues` or `triggers`, or the defaults."""
        found = self.queues.get(name)
        if found is None:
            trigger = self.trigger(name)
            found = Queue() if trigger is None else trigger.queue()
        return self.tasks.complete(name, found)

    def trigger(self, queue: str) -> Trigger | None:
        """Return the entry of `triggers` that reads this queue."""
        return next((t for t in self.triggers if t.queue_name == queue), None)

    def slots(self, queue: str) -> int:
        """Return the concurrent runs of one queue in one worker."""
        trigger = self.trigger(queue)
        return self.worker.slots if trigger is None else trigger.concurrency

    def retry_policy(self, queue: str | None = None) -> RetryPolicy:
        """Return the retry policy of a queue, or the default one."""
        own = self.queue(queue) if queue is not None else Queue()

        def pick(name: str) -> Any:
            value = getattr(own, name)
            return getattr(self.retry, name) if value is None else value

        return RetryPolicy(
            max_retries=pick("max_retries"),
            base_delay=pick("base_delay_s"),
            max_delay=pick("max_delay_s"),
            backoff_factor=pick("backoff_factor"),
            table=pick("waits_s"),
            jitter=pick("jitter"),
        )

    def subscription(self, queue: str) -> Subscription:
        """Return the subscription of a queue for the engine."""
        own = self.queue(queue)
        found = Subscription(
            name=queue,
            queue=queue,
            broker=self.endpoint(queue).name,
            group=own.group or "",
            codec=own.codec,
            tenant=own.tenant,
            ordered=own.ordered is not False,
            ack_policy=own.ack_policy,
            dedup=own.dedup,
            dedup_window_s=own.dedup_window_s or 0.0,
            broker_dead_letters=own.broker_dead_letters,
            protocol=self.tasks.protocol(own, max_retries=self.retry_policy(queue).max_retries),
        )
        trigger = self.trigger(queue)
        if trigger is None:
            return found
        return msgspec.structs.replace(
            found,
            group=trigger.consumer_group,
            type_header=trigger.event_name_header,
            dedup_by_id=True,
        )

    def check_triggers(self) -> None:
        """Raise ConfigError if the broker of a trigger's adapter is not known."""
        problems = []
        for trigger in self.triggers:
            try:
                trigger.adapter.url(self.endpoints[DEFAULT].kind)
            except ConfigError as error:
                problems += [f"trigger {trigger.queue_name}: {each}" for each in error.problems]
        if problems:
            raise ConfigError(problems)

    def describe(self) -> list[Setting]:
        """Return every setting with its masked value and its origin."""
        effective: dict[str, Any] = {
            "ledger.key_file": self.ledger_key_file,
            "ledger.anchor_file": self.ledger_anchor_file,
        }
        origins = dict(self.origins)
        in_url = parameter(self.broker, "visibility_timeout_s")
        if in_url is not None:  # it wins over the setting
            number = in_url.replace(".", "", 1).isdecimal()
            effective["tasks.visibility_timeout_s"] = float(in_url) if number else in_url
            origins["tasks.visibility_timeout_s"] = origins.get("broker", "default")
        return [
            Setting(path, _plain(effective.get(path, value), name), origins.get(path, "default"))
            for path, name, value in _leaves(self, "")
        ]


NOT_SETTINGS = frozenset({"file", "origins"})


def _leaves(value: Any, path: str, name: str = "") -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, msgspec.Struct):
        fields = [f for f in value.__struct_fields__ if path or f not in NOT_SETTINGS]
        for field in fields:
            yield from _leaves(getattr(value, field), join(path, field), field)
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, join(path, str(key)), str(key))
    elif isinstance(value, tuple | list) and any(isinstance(v, msgspec.Struct) for v in value):
        for index, item in enumerate(value):
            yield from _leaves(item, join(path, index), name)
    else:
        yield path, name, value


def _plain(value: Any, name: str) -> Any:
    """Return a value for people, with secrets masked."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item, name) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, key) for key, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Secret):
        shown = mask_value(value.reveal())
        hidden = is_secret_name(name) or shown == value.reveal()
        return MASK if hidden else shown
    if isinstance(value, str):
        return MASK if value and is_secret_name(name) else mask_value(value)
    return value
