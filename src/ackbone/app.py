"""`App`: the class that programs use. It registers handlers, sends messages and runs workers.

Its parts are put together in `composition/`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Never, NoReturn, TypeVar

import msgspec

from ackbone.backends import Storage, storage_of
from ackbone.composition.brokers import Brokers, explained
from ackbone.composition.event_loops import LoopLock, LoopThread, beside_the_loop
from ackbone.composition.idle import idle
from ackbone.composition.registrations import Registrations, formed
from ackbone.composition.worker_parts import handling, ports, worker_settings
from ackbone.config import Config, load_config
from ackbone.config.rules_file import load_rules
from ackbone.config.settings import DEFAULT
from ackbone.core.broker import Broker, Subscription
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import AckboneError, BrokerUnavailable, ConfigError
from ackbone.core.events import Observer
from ackbone.core.guard import Guard
from ackbone.core.ids import derived_id
from ackbone.core.message import Message, check_name
from ackbone.core.notices import Notices
from ackbone.core.outbound.delivery import DIRECT, SCHEDULED, Channel, New, check_recipient
from ackbone.core.outbound.subscribers import Subscribers
from ackbone.core.retry import RetryPolicy
from ackbone.core.store import Company, Send, Store
from ackbone.core.task_protocol import TaskBroker
from ackbone.core.text import unknown_option
from ackbone.delivery.carrier import Carried
from ackbone.engine.handlers import Handlers
from ackbone.engine.relays import Relay
from ackbone.engine.sender import Receipt, Sender, SendPolicy
from ackbone.engine.wiring import Middleware
from ackbone.engine.worker import Drained, EngineWorker
from ackbone.governance.rulebook import RuleFile, ask_in_turn
from ackbone.observe.metrics import Metrics
from ackbone.observe.observers import listener_of

log = logging.getLogger("ackbone.app")

_FROM_CONFIG = (
    "handlers",
    "storage",
    "rule_file",
    "_channels",
    "_default_queue",
    "_sender",
    "_subscribers",
)
"""Cached properties that depend on the configuration."""
ON_OPTIONS = ("queue", "retries", "retry", "timeout_s", "isolation")
Fn = TypeVar("Fn", bound=Callable[..., Any])


class App:
    """Handlers, and the broker and store that they run on.

    app = App()                          # ackbone.yaml, or SQLite under ./.ackbone

    @app.on("greeting")
    async def greet(ctx: Context) -> None:
        await ctx.reply(f"Hello, {ctx.payload['name']}")

    `App()` reads its configuration each time it is opened, not when it is made. The --config of a
    command and the environment at that time decide.
    """

    def __init__(
        self,
        config: Config | Path | str | None = None,
        *,
        name: str = "app",
        clock: Clock | None = None,
    ) -> None:
        self.own_configuration = (
            config if config is None or isinstance(config, Config) else Path(config)
        )
        """The configuration that the program names. None: the environment decides."""
        self._config: Config | None = None
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.target: str | None = None
        """The name by which a child process finds this app: `module:attribute` or
        `file.py:attribute`."""
        self._registered = Registrations()
        self._middleware: list[Middleware] = []
        self._observers: list[Observer] = []
        self._metrics: Metrics | None = None
        self._guard: Guard | None = None
        self._brokers: Brokers | None = None
        self._store: Store | None = None
        self._sync: LoopThread | None = None
        self._syncing = threading.Lock()
        self._users = 0
        self._entering = LoopLock()
        self._opened_before = False
        self._consumer = ""
        """The name of the worker in the store, and of the consumer at brokers that name them."""

    # -- configuration ----------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The settings. They are read when the app is opened, or when first asked for."""
        if self._config is None:
            self._config = self._read_config()
        return self._config

    def _read_config(self) -> Config:
        own = self.own_configuration
        return own if isinstance(own, Config) else load_config(own)

    def _renew_config(self) -> None:
        """Read the settings again. If they changed, drop everything that was made from them."""
        found = self._read_config()
        if found == self._config:
            return
        self._config = found
        for name in _FROM_CONFIG:
            self.__dict__.pop(name, None)

    @functools.cached_property
    def handlers(self) -> Handlers:
        """The registered handlers, each with the settings of the queue that it reads."""
        return self._registered.handlers(self.config)

    @functools.cached_property
    def _subscribers(self) -> Subscribers:
        return self._registered.subscribers(self.config)

    @functools.cached_property
    def _sender(self) -> Sender:
        return Sender(
            self._send_policy,
            self._broker_that_sends,
            max_bytes=self.config.max_message_bytes,
            timeout_s=self.config.send_timeout_s,
            hold_back=self._hold_back,
        )

    @property
    def metrics(self) -> Metrics | None:
        """The counts of this process. None: they are switched off."""
        if not self.config.metrics.enabled:
            return None
        if self._metrics is None:
            self._metrics = Metrics()
        return self._metrics

    def check(self) -> None:
        """Raise ConfigError with every mistake that keeps a worker from starting.

        Nothing is opened. `ackbone run`, `dev` and `config check` call this first.
        """
        steps: list[Callable[[], object]] = [
            lambda: self.storage,
            lambda: Brokers(self.config, clock=self.clock),
            self.subscriptions,
            lambda: self.rule_file,
            lambda: self._subscribers,
            self.carried,
        ]
        problems: list[str] = []
        for step in steps:
            try:
                step()
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))

    # -- what runs --------------------------------------------------------------------------------

    def on(
        self,
        type: str,
        *,
        queue: str | None = None,
        retries: int | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
        isolation: str = "none",
        **unknown: Never,
    ) -> Callable[[Fn], Fn]:
        """Register a handler for a message type (`*`: every type without a handler of its own).

        An async function runs on the event loop, a plain one in a thread. `isolation="process"`
        runs it in a child process that can be killed.
        """
        for name in unknown:
            raise TypeError(f"app.on: {unknown_option(name, ON_OPTIONS)}")
        if not isinstance(type, str):
            raise TypeError(f'app.on needs a message type: write @app.on("type"), not {type!r:.80}')
        if isolation not in ("none", "process"):
            raise ValueError(f"isolation is 'none' or 'process', not {isolation!r}")
        if queue is not None:
            check_name("queue", queue)

        def register(fn: Fn) -> Fn:
            draft = self._registered.handler(
                fn,
                type=type,
                queue=queue,
                retry=retry,
                retries=retries,
                timeout_s=timeout_s,
                isolation=isolation,
            )
            if "handlers" in self.__dict__:
                self.handlers.add(draft.complete(self.config))
            return fn

        return register

    def middleware(self, fn: Middleware) -> Middleware:
        """Wrap every handler's call: `async def wrap(ctx, call_next)`. The first is outermost."""
        self._middleware.append(fn)
        return fn

    def observe(self, fn: Observer) -> Observer:
        """Call `fn` with every event after its commit. An observer can only watch."""
        self._observers.append(fn)
        if self._store is not None:
            self._store.on_events(listener_of(fn))
        return fn

    def subscribe(
        self,
        channel: str,
        recipient: str,
        *,
        events: Sequence[str] = ("delivery.*",),
        tenant_id: str | None = None,
        form: Literal["json", "text"] | None = None,
    ) -> None:
        """Notify a recipient of events, each by a delivery that is committed with the event.

        `form`: json for programs (the default for webhooks), a line of text for people (the default
        otherwise). Subscribers in ackbone.yaml are notified of what commands do as well.
        """
        subscriber, form = self._registered.subscriber(
            channel, recipient, events=events, tenant_id=tenant_id, form=form
        )
        if "_subscribers" in self.__dict__:
            self._subscribers.add(formed(subscriber, form, self.config))

    def channel(
        self,
        channel: Channel,
        *,
        timeout_s: float | None = None,
        on_unknown: Literal["resend", "hold"] | None = None,
    ) -> None:
        """Send replies for `channel.name` by this channel, in every worker of this app.

        `on_unknown`: a reply that may have arrived is sent again, with a mark, or held until an
        operator decides.
        """
        draft = self._registered.channel(channel, timeout_s=timeout_s, on_unknown=on_unknown)
        if "_channels" in self.__dict__:
            self._channels[channel.name] = draft.complete(self.config)

    def carried(self) -> list[Carried]:
        """Return the channels of this app: the registered ones, then those of the configuration.

        Raises ConfigError with every channel that cannot be made.
        """
        return list(self._channels.values())

    @functools.cached_property
    def _channels(self) -> dict[str, Carried]:
        return self._registered.channels(self.config)

    @property
    def channel_names(self) -> frozenset[str]:
        """The names of all channels of this app. No channel is made for this."""
        return frozenset({*self._registered.channel_names, *self.config.channels})

    @property
    def telling_channels(self) -> frozenset[str]:
        """The channels that notifications for subscribers go to."""
        return self._subscribers.channels

    def guard(self, fn: Guard) -> Guard:
        """Decide before each run whether it may happen: `async def guard(context) -> Decision`.

        With a rule file both must say yes; the rules are asked first.
        """
        self._guard = fn
        return fn

    @functools.cached_property
    def rule_file(self) -> RuleFile | None:
        """The rule file of the configuration. Raises ConfigError if it is broken."""
        path = self.config.rules
        return None if path is None else RuleFile(path, functools.partial(load_rules, path))

    @property
    def _guards(self) -> Guard | None:
        """The rules, the guard function, or both. None: every run is allowed."""
        book = None if self.rule_file is None else self.rule_file.book
        guards: list[Guard] = [each for each in (book, self._guard) if each is not None]
        return (
            functools.partial(ask_in_turn, guards) if len(guards) > 1 else next(iter(guards), None)
        )

    # -- open and close ---------------------------------------------------------------------------

    async def open(self, *, connect: bool = True) -> None:
        """Open broker and store, and create or migrate the database. Idempotent.

        `connect=False`: do not connect to a broker that is a server, for work on the store alone.
        """
        async with self._entering.here():
            await self._open(connect=connect)

    async def _open(self, *, connect: bool = True) -> None:
        if self._store is not None:
            return
        self._renew_config()
        await beside_the_loop(self.storage.ensure)
        self._brokers = brokers = Brokers(self.config, clock=self.clock)
        self._consumer = brokers.prepare(
            self.worker_name(os.getpid()),
            # A little less than the sender's own limit, so that the broker's error comes first: it
            # names the cause.
            publish_within_s=0.9 * self.config.send_timeout_s,
            config_now=self._config_now,
        )
        store = self.storage.make_store(
            brokers,
            clock=self.clock,
            isolates=self.target is not None,
            notices=functools.cache(self._notices_of),
            subscribers=self._subscribers,
        )
        try:
            await brokers.open(servers=connect)
            await store.open()
        except BaseException:
            await brokers.close()
            self._brokers = None
            raise
        for observer in self._observers:
            store.on_events(listener_of(observer))
        if self.metrics is not None:
            store.on_events(self.metrics.hear)
        self._store = store

    def _config_now(self) -> Config:
        """Return the configuration as its file has it now, with a changed password."""
        return self.config if self.config.file is None else load_config(self.config.file)

    @functools.cached_property
    def storage(self) -> Storage:
        """The database of the configuration. Raises ConfigError if its driver is missing."""
        return storage_of(self.config)

    async def close(self) -> None:
        """Flush what was sent, then close store and broker. Idempotent."""
        if "_sender" in self.__dict__:
            await self._sender.drain()
        if self._store is not None:
            store, self._store = self._store, None
            await store.close()
        if self._brokers is not None:
            brokers, self._brokers = self._brokers, None
            await brokers.close()

    async def __aenter__(self) -> App:
        """Open the app. `async with` blocks may overlap, as a worker's and an orchestrator's do."""
        async with self._entering.here():
            if not self._users:
                self._opened_before = self._store is not None
            await self._open()
            self._users += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the app with the last block, unless it was open before the first one."""
        async with self._entering.here():
            self._users -= 1
            if not self._users and not self._opened_before:
                await self.close()

    @property
    def brokers(self) -> Brokers:
        """The brokers of the open app, by name."""
        if self._brokers is None:
            raise RuntimeError("the app is not open: use 'async with app' or 'await app.open()'")
        return self._brokers

    @property
    def broker(self) -> Broker:
        """The broker that is called `default`."""
        return self.brokers.by_name[DEFAULT]

    def _broker_of(self, queue: str) -> Broker | None:
        """Return the broker of a queue. None: the queue is in the store's own file."""
        return None if self.store.holds(queue) else self.brokers.of(queue)

    @property
    def store(self) -> Store:
        if self._store is None:
            raise RuntimeError("the app is not open: use 'async with app' or 'await app.open()'")
        return self._store

    # -- send -------------------------------------------------------------------------------------

    async def send(
        self,
        type: str,
        payload: Any = None,
        *,
        queue: str | None = None,
        **options: Any,
    ) -> Receipt:
        """Send a message. Returns when it is durable. If it raises, nothing was accepted.

        Options: id, tenant_id, idempotency_key, ordering_key, priority, delay_s, ttl_s,
        correlation_id, channel, source, trace, headers, metadata.
        """
        send = self._sender.outgoing(type, payload, self._queue(queue), options)
        return await self._published(send)

    async def send_message(self, message: Message, *, queue: str | None = None) -> Receipt:
        """Send a message that exists already (a replay, a line of a file)."""
        send = self._sender.encoded(message, self._queue(queue))
        return await self._published(send)

    async def send_many(
        self, messages: Sequence[Message], *, queue: str | None = None
    ) -> list[Receipt]:
        """As `send_message`, for many at once. If one is invalid, none is accepted."""
        sends = self._encoded_many(messages, queue=queue)
        try:
            return await self._sender.publish_many(sends)
        except BrokerUnavailable as error:
            raise explained(self.config, self._queue(queue), error) from error

    async def _published(self, send: Send) -> Receipt:
        try:
            return await self._sender.publish(send)
        except BrokerUnavailable as error:
            raise explained(self.config, send.queue, error) from error

    def _encoded_many(self, messages: Sequence[Message], *, queue: str | None = None) -> list[Send]:
        """Return the messages as `send_many` would send them. Raises InvalidMessage."""
        to = self._queue(queue)
        return [self._sender.encoded(message, to) for message in messages]

    async def deliver(
        self, channel: str, recipient: str, content: str, *, scheduled: bool = False, **fields: Any
    ) -> str:
        """Send a text to a recipient, outside of any run. Returns its id when it is durable.

        `scheduled`: replies go first. Fields: id (sending the same id again changes nothing),
        tenant_id, conversation, options, max_retries, expires_s.
        """
        new = New(
            id=fields.pop("id", None) or str(uuid.uuid4()),
            channel=check_name("channel", channel),
            recipient=check_recipient(recipient),
            content=content,
            priority=SCHEDULED if scheduled else DIRECT,
            **fields,
        )
        await self.storage.deliveries(self.store).put([new])
        return new.id

    def send_sync(self, type: str, payload: Any = None, **options: Any) -> Receipt:
        """`send` for plain code. A thread with an event loop of its own does the work."""
        with self._syncing:
            if self._sync is None:
                self._sync = LoopThread()
            sync = self._sync
        return sync.run(self._open_and_send(type, payload, options))

    def close_sync(self) -> None:
        """Close the app and the thread that `send_sync` opened."""
        if self._sync is not None:
            sync, self._sync = self._sync, None
            sync.run(self.close())
            sync.close()

    def outgoing(
        self,
        type: str,
        payload: Any,
        *,
        queue: str | None = None,
        **options: Any,
    ) -> Send:
        """Return the message as it would be sent, checked. Raises InvalidMessage."""
        return self._sender.outgoing(type, payload, self._queue(queue), options)

    def _queue(self, named: str | None) -> str:
        return self._default_queue if named is None else named

    @functools.cached_property
    def _default_queue(self) -> str:
        return self.config.default_queue

    def _broker_that_sends(self, queue: str) -> Broker:
        return self.brokers.of(queue)

    async def _hold_back(self, send: Send) -> None:
        await self.store.hold_back(send)

    def _send_policy(self, queue: str) -> SendPolicy:
        own = self.config.queue(queue)
        return SendPolicy(codec=own.codec, ttl_s=own.ttl_s)

    def _follow_up(
        self,
        parent: Message,
        type: str,
        payload: Any,
        options: Mapping[str, Any],
    ) -> Send:
        """Make the message of `ctx.send`, with its parent's tenant, trace and correlation."""
        inherited = {
            "tenant_id": parent.tenant_id,
            "correlation_id": parent.correlation_id or parent.id,
            "channel": parent.channel,
            "trace": parent.trace,
        }
        return self.outgoing(type, payload, **{**inherited, **options})

    async def _open_and_send(self, type: str, payload: Any, options: Mapping[str, Any]) -> Receipt:
        await self.open()
        return await self.send(type, payload, **options)

    # -- work -------------------------------------------------------------------------------------

    def subscriptions(self) -> list[Subscription]:
        """Return a subscription for every queue that has a handler or is configured."""
        config = self.config
        config.check_triggers()
        triggers = (trigger.queue_name for trigger in config.triggers)
        names = {*self.handlers.queues, *config.queues, *triggers} or {config.default_queue}
        return [config.subscription(name) for name in sorted(names)]

    def _notices_of(self, queue: str) -> Notices | None:
        """Return the queues that get notices about the ends of messages of a queue, or None. The
        app must be open."""
        notices = self.config.queue(queue).notices
        if notices is None or not isinstance(self.brokers.of(queue), TaskBroker):
            return notices
        return msgspec.structs.replace(notices, on_ack=True)

    def summary(self) -> str:
        """Return what a worker of this app serves, in one line."""
        queues = ", ".join(map(self._served, self.subscriptions()))
        brokers = dict.fromkeys(each.kind.name for each in self.config.endpoints.values())
        kinds = [f"broker {', '.join(brokers)}"]
        if [self.config.store_kind] != list(brokers):
            kinds.append(f"store {self.config.store_kind}")
        return ", ".join([*kinds, f"queues {queues}"])

    def _served(self, sub: Subscription) -> str:
        n = len(self.handlers.types(sub.queue))
        on = "" if sub.broker == DEFAULT else f" on {sub.broker}"
        return f"{sub.queue}{on} ({n or 'no'} handler{'' if n == 1 else 's'})"

    def worker(
        self,
        *,
        company: Company = Company.ANY,
        warden: bool = False,
        cautious: bool = False,
        parent: str | None = None,
        relays: Sequence[Relay] = (),
        end_process: Callable[[], NoReturn] | None = None,
        on_work: Callable[[], None] | None = None,
    ) -> EngineWorker:
        """Make an engine for this process, not started. The app must be open.

        `company`: which messages it runs. `warden`: it runs none, and looks after processes that
        run suspects. `cautious`: it begins with few slots. `parent`: the process that started this
        one. `end_process`: called when the event loop is stuck for good. `on_work`: called before
        the first run.
        """
        settings = worker_settings(self, company=company, cautious=cautious, parent=parent)
        self.store.governed = self._guards is not None
        if self.rule_file is not None:
            self.store.quotas_of = self.rule_file.book.quotas_of
        worker = EngineWorker(
            ports(self),
            handling(self),
            [] if warden else self.subscriptions(),
            settings,
            relays=relays,
            end_process=end_process,
            on_work=on_work,
        )
        if self.metrics is not None:
            self.metrics.watch(worker.serving)
        return worker

    def handled_types(self) -> dict[str, frozenset[str]]:
        """Return the message types that have a handler here, by subscription."""
        return {sub.name: frozenset(self.handlers.types(sub.queue)) for sub in self.subscriptions()}

    @property
    def kind(self) -> str:
        """A text that is the same for all apps with these handlers: they run the same messages."""
        return derived_id(*sorted(f"{each.queue}/{each.type}" for each in self.handlers))

    def worker_name(self, pid: int) -> str:
        """Return the name under which a worker in this process registers."""
        return f"{self.name}@{socket.gethostname()}:{pid}"

    async def work(self, *, until_idle: bool = False) -> Drained:
        """Run a worker in this process until cancelled, or until nothing is left to do.

        At its end it waits for plain handlers even beyond `worker.shutdown_timeout_s`: a thread
        cannot be stopped, and this process goes on.
        """
        from ackbone.composition.background import relays_of

        async with self:
            worker = self.worker(relays=relays_of(self, spawn_solo=True))
            await worker.begin()
            try:
                if until_idle:
                    await self.idle(worker)
                else:
                    await worker.stopped.wait()
            finally:
                drained = await asyncio.shield(worker.drain(outlast_threads=True))
            if worker.failure is not None:
                raise AckboneError(f"the worker stopped: {worker.failure}") from worker.failure
            return drained

    async def idle(self, worker: EngineWorker) -> None:
        """Wait until nothing is left to do (`composition/idle.py`)."""
        await idle(self, worker)
