"""`QueueTrigger`: a queue whose messages start agent runs, on the real engine.

The store decides which message runs, counts attempts, keeps retries until they are due and keeps
dead letters. A message is settled with its queue once, when the store has its end. If the process
dies before that, the queue redelivers the message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

import msgspec

from ackbone.backends import endings_of, storage_of
from ackbone.composition.background import export_relay, store_relays
from ackbone.config import Config, Worker
from ackbone.config.endpoints import read_url
from ackbone.core.breaker import BreakerPolicy
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import ConfigError, InvalidMessage
from ackbone.core.events import Entry, Listener
from ackbone.core.outcome import Ending, Identity
from ackbone.core.retry import RetryPolicy
from ackbone.core.secret import mask_line
from ackbone.core.store import Store
from ackbone.engine.decoder import decoder
from ackbone.engine.handlers import ANY_TYPE, Handler, Handlers
from ackbone.engine.relays import Relay
from ackbone.engine.wiring import Handling, Ports, WorkerSettings
from ackbone.engine.worker import EngineWorker
from ackbone.observe.export import Exporter
from ackbone.observe.metrics import Metrics
from ackbone.observe.redact import redact
from ackbone.triggers.announcer import Announcer
from ackbone.triggers.broker import AdapterBroker
from ackbone.triggers.config import QueueTriggerConfig, validate_config
from ackbone.triggers.mapping import subscription_of
from ackbone.triggers.messages import PARSER_OF
from ackbone.triggers.ports import (
    AgentRuntime,
    GovernanceLayer,
    IdempotencyStore,
    Ledger,
    QueueAdapter,
)
from ackbone.triggers.runner import AgentRunner

log = logging.getLogger("ackbone.trigger")

LONGEST_WAIT_S = 31_536_000.0
"""Longest wait of a retry, in seconds: one year."""


class State(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"


class QueueTrigger:
    """Consumes a queue and runs an agent for each message, effectively once.

    `store`: a path, `postgresql://…`, a `Config`, or a store that is already open. Without one, it
    is a temporary file that is deleted with this object; the queue still has the messages that have
    not ended by then. `governance`, `ledger` and `idempotency_store` may be None. `worker` has the
    engine's limits (lease, crash budget). `metrics` counts; the counts go to the store's
    `queue_metrics`, unless the store was given open, because then its owner exports them.
    `on_dedup_unavailable`: what happens to a message while `idempotency_store` cannot be asked.
    `stop`: it waits without using up an attempt. `continue`: it runs, and may run twice. None: as
    the `Config` says if `store` is one, else `continue`.
    """

    def __init__(  # noqa: PLR0913 - the six are the specification's
        self,
        config: QueueTriggerConfig,
        adapter: QueueAdapter,
        agent_runtime: AgentRuntime,
        governance: GovernanceLayer | None,
        ledger: Ledger | None,
        idempotency_store: IdempotencyStore | None,
        *,
        store: Store | Config | Path | str | None = None,
        shutdown_timeout_s: float = 30.0,
        worker: Worker | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        on_dedup_unavailable: Literal["stop", "continue"] | None = None,
    ) -> None:
        problems = validate_config(config)
        if problems:
            raise ConfigError(problems)
        self.config = config
        self.adapter = adapter
        self.agent_runtime = agent_runtime
        self.governance = governance
        self.ledger = ledger
        self.idempotency_store = idempotency_store
        self.parser = PARSER_OF[config.parser_type]
        self._given_store = store
        self._settings = worker or (store.worker if isinstance(store, Config) else Worker())
        self._max_bytes = store.max_message_bytes if isinstance(store, Config) else None
        said = store.on_dedup_unavailable if isinstance(store, Config) else "continue"
        self._may_miss_dedup = (on_dedup_unavailable or said) == "continue"
        self._shutdown_timeout_s = shutdown_timeout_s
        self._clock: Clock = clock or SystemClock()
        self._subscription = subscription_of(config)
        self.metrics = metrics or Metrics(queue_of={self._subscription.name: config.queue_name})
        # Weak: metrics and stores may outlive this trigger, and must not keep it in memory.
        serving, heard = weakref.WeakMethod(self._serving), weakref.WeakMethod(self._heard)
        self.metrics.watch(lambda: found() if (found := serving()) else {})
        self._listener: Listener = lambda entries: found(entries) if (found := heard()) else None
        self._state = State.STOPPED
        self._store: Store | None = None
        self._engine: _Engine | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._listens = False

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and begin to consume.

        Raises RuntimeError if it is already running, and ConnectionError if the queue cannot be
        reached. It does not retry by itself.
        """
        if self._state is not State.STOPPED:
            raise RuntimeError("Trigger is already running")
        self._state = State.STARTING
        try:
            await self._connect()
            try:
                self._engine = await self._begin()
            except BaseException:
                await self._close_adapter()
                await self._close_store()
                raise
        except BaseException:
            self._state = State.STOPPED
            raise
        self._state = State.RUNNING
        log.info(
            "Started %d consumer workers on %s", self.config.concurrency, self.config.queue_name
        )

    async def stop(self) -> None:
        """Wait for running messages, return the others to the queue, and close everything.

        It waits up to `shutdown_timeout_s` for running messages. If the caller is cancelled, the
        stop continues. Stopping twice does no harm.
        """
        if self._state is State.STOPPING and self._stopping is not None:
            await asyncio.shield(self._stopping)
        elif self._engine is not None:
            self._state = State.STOPPING
            stopping = self._stop(self._engine)
            self._stopping = asyncio.create_task(stopping, name="ackbone-trigger-stop")
            await asyncio.shield(self._stopping)

    async def _stop(self, engine: _Engine) -> None:
        try:
            drained = await engine.worker.drain(self._shutdown_timeout_s)
            engine.announcer.finish()
            await engine.announcing
            unfinished = engine.broker.held + drained.handed_back
            await engine.broker.close()
            if unfinished:
                log.warning(
                    "Stopped %s with %d unfinished messages; the queue has them again",
                    self.config.queue_name,
                    unfinished,
                )
        finally:
            engine.forget_clock()
            engine.announcing.cancel()
            self._engine = None
            await self._close_adapter()
            await self._close_store()
            self._state = State.STOPPED
        log.info("Gracefully stopped %s: %d finished", self.config.queue_name, drained.finished)

    async def pause(self) -> None:
        """Stop starting messages until `resume`. Running messages continue."""
        if self._state is State.RUNNING and self._engine is not None:
            self._engine.broker.pause()
            self._engine.worker.pause()
            self._state = State.PAUSED
            log.info("Paused consumption of %s", self.config.queue_name)

    async def resume(self) -> None:
        """Consume again after `pause`."""
        if self._state is State.PAUSED and self._engine is not None:
            self._engine.worker.resume()
            self._engine.broker.resume()
            self._state = State.RUNNING
            log.info("Resumed consumption of %s", self.config.queue_name)

    async def health_check(self) -> dict[str, Any]:
        """Return status (healthy, degraded, unhealthy, paused), running, adapter_healthy and
        active_workers."""
        try:
            adapter_healthy = bool(await self.adapter.health_check())
        except Exception as error:
            log.warning(
                "health check of %s failed: %s", self.config.queue_name, mask_line(str(error))
            )
            adapter_healthy = False
        engine, alive = self._engine, self._is_alive
        running = alive and self._state is State.RUNNING
        active = 0
        if engine is not None and alive:
            active = self.config.concurrency if running else engine.worker.running
        if alive and self._state is State.PAUSED:
            status = "paused"
        else:
            status = "healthy" if running and adapter_healthy else "unhealthy"
        if status == "healthy" and engine is not None and not await engine.runner.dedup_is_up():
            status = "degraded"
        return {
            "status": status,
            "running": running,
            "adapter_healthy": adapter_healthy,
            "active_workers": active,
        }

    @property
    def store(self) -> Store:
        """The store behind the trigger, while it is started."""
        if self._store is None:
            raise RuntimeError("the trigger is not started")
        return self._store

    # -- composition ------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            await self.adapter.connect()
        except Exception as error:
            cause = mask_line(str(error) or type(error).__name__)
            log.error("Failed to connect to %s: %s", self.config.queue_name, cause)
            # Without the cause, whose text may contain credentials.
            raise ConnectionError(f"Cannot connect to {self.config.queue_name}: {cause}") from None

    async def _begin(self) -> _Engine:
        config, subscription, runner = self.config, self._subscription, self._runner()
        handlers = self._handlers(runner)
        broker = AdapterBroker(self.adapter, config)
        store, relays = await self._open_store(broker)
        self._store = store
        announcer = Announcer(
            broker,
            self.adapter,
            config,
            subscription,
            self.ledger,
            self._endings,
            decoder(subscription, max_bytes=self._max_bytes),
        )
        worker = EngineWorker(
            Ports(
                store=store, broker_of=lambda queue: broker, clock=self._clock, meter=self.metrics
            ),
            Handling(
                handlers=handlers,
                make_send=_no_send,
                # A breaker would hold retries back beyond the waits that the settings promise.
                breaker=BreakerPolicy(failures=0),
                threads=1,
                mask=redact,
            ),
            [subscription],
            WorkerSettings(
                name=f"trigger {config.queue_name}@{socket.gethostname()}:{os.getpid()}",
                slots=config.concurrency,
                lease_s=self._settings.lease_s,
                crash_budget=self._settings.crash_budget,
                shutdown_timeout_s=self._shutdown_timeout_s,
                stall_limit_s=self._settings.stall_limit_s,
                max_message_bytes=self._max_bytes,
            ),
            relays=relays,
        )
        await worker.begin()
        announcing = asyncio.create_task(announcer.run(), name="ackbone-trigger-announcer")
        forget = _nothing
        if isinstance(self._clock, _Movable):
            forget = self._clock.on_advance(store.look_again)
        return _Engine(worker, broker, runner, announcer, announcing, forget)

    def _runner(self) -> AgentRunner:
        queue = self.config.queue_name
        return AgentRunner(
            self.config,
            self.agent_runtime,
            self.governance,
            self.idempotency_store,
            guard_timeout_s=self._settings.guard_timeout_s,
            may_miss_dedup=self._may_miss_dedup,
            dedup_unavailable=partial(self.metrics.dedup_unavailable, queue, 1),
        )

    def _handlers(self, runner: AgentRunner) -> Handlers:
        config = self.config
        retry = RetryPolicy(
            max_retries=config.max_retries,
            base_delay=config.retry_backoff_base,
            max_delay=LONGEST_WAIT_S,
            backoff_factor=config.retry_backoff_multiplier,
            jitter=0.0,
        )
        handlers = Handlers()
        handlers.add(Handler(type=ANY_TYPE, queue=config.queue_name, call=runner.run, retry=retry))
        return handlers

    def _serving(self) -> dict[str, int]:
        """Return the value of `queue_active_workers`."""
        serving = self._state is State.RUNNING and self._is_alive
        return {self.config.queue_name: self.config.concurrency if serving else 0}

    @property
    def _is_alive(self) -> bool:
        engine = self._engine
        if engine is None or engine.announcing.done():
            return False
        return not engine.worker.stopped.is_set()

    def _heard(self, entries: Sequence[Entry]) -> None:
        """Count the events of a commit, and wake the announcer."""
        self.metrics.hear(entries)
        if self._engine is not None:
            self._engine.broker.changed.set()

    async def _endings(
        self, subscription: str, identities: Sequence[Identity]
    ) -> Mapping[Identity, Ending]:
        return await endings_of(self.store)(subscription, identities)

    # -- store and adapter ------------------------------------------------------------------------

    async def _open_store(self, broker: AdapterBroker) -> tuple[Store, list[Relay]]:
        """Open the store, and return it with its maintenance work."""
        given = self._given_store
        if given is None:
            # Kept as long as this object, so that a second start knows earlier messages.
            folder = tempfile.mkdtemp(prefix="ab-trigger-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            given = self._given_store = Path(folder) / "trigger.db"
        if not isinstance(given, Config | Path | str):
            await given.open()
            if not self._listens:
                self._listens = True
                given.on_events(self._listener)
            return given, []  # its owner has the ledger's key and the retention settings
        config = _store_config(given, self._settings)
        storage = storage_of(config)
        await asyncio.to_thread(storage.ensure)
        # A trigger has no supervisor to start child processes, so all messages run in this process.
        store = storage.make_store(None, clock=self._clock, isolates=False, notices=None)
        await store.open()
        try:
            store.on_events(self._listener)
            relays = store_relays(storage, store, config)
            if self.config.metrics_enabled and config.metrics.enabled:
                queues = self.config.queue_name.__eq__
                rows = storage.metric_rows(store)
                exporter = Exporter(self.metrics, rows, queues=queues, channels=False)
                every_s = self.config.metrics_export_interval or config.metrics.export_interval_s
                relays.append(export_relay(exporter, every_s))
            return store, relays
        except BaseException:
            await store.close()
            raise

    async def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None and store is not self._given_store:
            await store.close()

    async def _close_adapter(self) -> None:
        try:
            await self.adapter.close()
        except Exception as error:
            log.warning("closing %s: %s", self.config.queue_name, mask_line(str(error)))


class _Engine(NamedTuple):
    """The parts of a started trigger."""

    worker: EngineWorker
    broker: AdapterBroker
    runner: AgentRunner
    announcer: Announcer
    announcing: asyncio.Task[None]
    forget_clock: Callable[[], None]


@runtime_checkable
class _Movable(Protocol):
    """A clock that announces when a test moves it."""

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]: ...


def _store_config(given: Config | Path | str, worker: Worker) -> Config:
    """Return the settings of the store. A broker in them is not used: the adapter is the queue.

    The ledger's key is beside a store's file, or in `ACKBONE_HOME` for a URL.
    """
    if isinstance(given, str) and "://" in given:
        home = Path(os.environ.get("ACKBONE_HOME") or ".ackbone")
        try:
            given = Config(home=home, store=read_url("store", given, Path.cwd()))
        except ValueError as error:
            raise ConfigError([f"store: {error}"]) from None
    elif not isinstance(given, Config):
        path = os.path.abspath(given)
        given = Config(home=Path(path).parent, store=f"sqlite:///{path}")
    store = f"sqlite:///{given.store_file}" if given.store_kind == "sqlite" else given.store
    return msgspec.structs.replace(given, broker="memory://", store=store, worker=worker)


def _no_send(*args: Any, **options: Any) -> NoReturn:
    raise InvalidMessage("a trigger's run has no queue to send follow-ups to")


def _nothing() -> None:
    """Do nothing: this clock has no callbacks."""
