"""The life of one worker: it registers, fetches, keeps its lease, drains and signs off.

What happens to a message is in `steps.py`; the relays beside it are in `worker_relays.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, NoReturn

import msgspec

from ackbone.core.broker import Subscription
from ackbone.core.errors import StoreError
from ackbone.core.store import Offers, Worker

from .fetcher import BrokerFetcher, StoreFetcher, TakeFetcher
from .flow import Flow
from .guard import asking
from .lease import Lease, LeaseLimits
from .outages import STORE, Outages
from .relays import Relay, run_relay, step_once
from .steps import Steps
from .watchdog import Watchdog
from .wiring import Handling, Ports, WorkerSettings
from .worker_relays import WorkerRelays

log = logging.getLogger("ackbone.engine")

FIRST_STEPS_S = 1.0
"""After a crash, relays that step no more often than this make their first step this late: together
they cost as much as the start of the process."""


class Phase(StrEnum):
    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended."""

    finished: int
    handed_back: int


class EngineWorker:
    """The engine of one process. `begin` it, then `drain` it."""

    def __init__(
        self,
        ports: Ports,
        handling: Handling,
        subscriptions: Sequence[Subscription],
        settings: WorkerSettings,
        *,
        relays: Sequence[Relay] = (),
        end_process: Callable[[], NoReturn] | None = None,
        on_work: Callable[[], None] | None = None,
    ) -> None:
        """`end_process` is called when the event loop is stuck for good. Without it the lease is
        given up and the process goes on: it belongs to another program. `on_work` is called once,
        before the first run starts."""
        self._store = ports.store
        self._clock = ports.clock
        self._settings = settings
        self._handlers = handling.handlers
        self._subscriptions = list(subscriptions)
        self._extra_relays = list(relays)
        self._end_process = end_process
        self.outages = Outages(ports.clock)
        guard = handling.guard
        self._steps = Steps(
            ports,
            self.outages,
            guard=None if guard is None else asking(guard, timeout_s=handling.guard_timeout_s),
            max_bytes=settings.max_message_bytes,
            room_of=lambda name: settings.own_slots.get(name, settings.slots),
        )
        self._flow = Flow(
            ports, self._steps, handling, self._subscriptions, settings, life=self, on_work=on_work
        )
        self._executor = self._flow.executor
        self._settler = self._flow.settler
        self._relays = WorkerRelays(ports, self._steps, self._flow, settings, self._offers)
        self._tasks: list[asyncio.Task[None]] = []
        self._lease: Lease | None = None
        self._watchdog: Watchdog | None = None
        self.phase = Phase.NEW
        self.recycle = False
        """True: a handler cannot be stopped, and this process should be replaced."""
        self.stopped = asyncio.Event()
        self.failure: BaseException | None = None

    # -- life -------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Register and begin to fetch."""
        if self.phase is not Phase.NEW:
            raise RuntimeError("the worker was started before")
        await self._relays.bind_queues(self.worker)
        await self._register()
        self.phase = Phase.RUNNING
        self._watchdog = Watchdog(lambda: self._executor.active, self._clock)
        relays = [*self._relays.relays(), *self._extra_relays]
        await self._relays.read_paused(self.worker)
        self._flow.is_open = True
        for sub in self._subscriptions:
            for fetcher in self._fetchers(sub):
                self._spawn(fetcher.run(), f"fetch {sub.name}")
        # A process that may die soon does first what cannot wait.
        hurried = self._settings.cautious or self._settings.is_child
        for relay in relays:
            waits = hurried and relay.bell is None and relay.every_s >= FIRST_STEPS_S
            after_s = FIRST_STEPS_S if waits else 0.0
            self._spawn(run_relay(relay, self, self.outages, after_s=after_s), relay.name)

    def _fetchers(self, sub: Subscription) -> list[TakeFetcher | BrokerFetcher | StoreFetcher]:
        steps, slots, flow = self._steps, self._flow.slots[sub.name], self._flow
        if self._settings.is_child:
            return [StoreFetcher(sub, steps, slots, flow, company=self._settings.company)]
        if steps.sources.broker(sub) is None:
            return [TakeFetcher(sub, steps, slots, flow)]
        return [
            BrokerFetcher(sub, steps, slots, flow),
            StoreFetcher(sub, steps, slots, flow),
        ]

    async def drain(
        self, timeout_s: float | None = None, *, outlast_threads: bool = False
    ) -> Drained:
        """Stop fetching, let runs finish up to the limit, hand back the rest. Idempotent.

        `outlast_threads`: this process goes on. Plain handlers, which cannot be stopped, are waited
        for however long they take: handed back, their messages would run beside them.
        """
        if self.phase in (Phase.STOPPED, Phase.NEW):
            self.phase = Phase.STOPPED
            self.stopped.set()
            return Drained(finished=self.finished, handed_back=0)
        limit = self._settings.shutdown_timeout_s if timeout_s is None else timeout_s
        self.phase = Phase.DRAINING
        self._flow.is_open = False
        await self._stop_tasks("fetch")
        if self._executor.running:
            await self._leave(running=True)  # from now on a kill does not count as a crash
        deadline = self._clock.monotonic() + limit
        while self._executor.running and self._clock.monotonic() < deadline:
            tasks = [active.task for active in self._executor.active if active.task]
            left = deadline - self._clock.monotonic()
            await asyncio.wait(tasks, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
        unfinished = self._executor.active
        self._executor.cancel_all("drain")
        if unfinished:
            tasks = [a.task for a in unfinished if a.task and not a.thread]
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)
        handed_back = len(unfinished)
        if outlast_threads:
            handed_back -= await self._executor.outlast_threads()
        elif self.recycle:
            # The next attempt must find the process gone: the rest takes a lease at most.
            handed_back -= self._executor.give_up_timed_out(after_s=2 * self._settings.lease_s)
        await self._settle_all()
        await self._close()
        if handed_back:
            log.warning("stopped with %d unfinished messages, handed back", handed_back)
        log.info(
            "worker %d stopped: %d finished, %d handed back",
            self.worker.worker_id,
            self.finished,
            handed_back,
        )
        return Drained(finished=self.finished, handed_back=handed_back)

    async def _settle_all(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.lease_s):
                await self._settler.drain()
        left = self._settler.stop()
        if left:
            log.error("%d finished runs could not be committed; they will run again", left)

    async def _close(self) -> None:
        running = self._executor.running > 0
        await self._stop_tasks()
        await self._last_steps()
        if self._watchdog is not None:
            self._watchdog.close()
        if self._lease is not None:
            await asyncio.to_thread(self._lease.close)
        await self._leave(running=running)
        await self._executor.close()
        self.phase = Phase.STOPPED
        self.stopped.set()

    async def _last_steps(self) -> None:
        """Make the last steps of relays that have one: counts, ledger anchor, replies."""
        try:
            async with asyncio.timeout(self._settings.lease_s):
                for relay in self._extra_relays:
                    if relay.at_end:
                        await step_once(relay, self, self.outages, last=True)
        except Exception:
            log.exception("the worker stops, but a last step failed")

    async def _leave(self, *, running: bool) -> None:
        try:
            await self._store.leave(self.worker, running=running)
        except StoreError as error:
            log.warning("worker %d could not sign off: %s", self.worker.worker_id, error)

    # -- what others ask --------------------------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """The registration of this worker. After a lost lease it is another one."""
        return self._steps.worker

    @property
    def finished(self) -> int:
        """Messages that ended in this worker."""
        return self._flow.finished

    @property
    def running(self) -> int:
        return self._executor.running

    def is_idle(self) -> bool:
        """Return True if nothing runs, and nothing waits to be committed or settled."""
        return self._flow.is_idle

    def serving(self) -> dict[str, int]:
        """Return the slots that take messages, by queue. A stopped or paused queue has 0."""
        return self._flow.serving()

    def pause(self) -> None:
        """Stop starting runs in this worker. Runs in progress continue."""
        self._flow.halted = True

    def resume(self) -> None:
        """Start runs again after `pause`."""
        self._flow.halted = False

    def cancel(self, message_id: str) -> bool:
        """Ask a running message to stop."""
        return self._executor.cancel(message_id)

    async def hold_role(self, role: str) -> bool:
        return await self._store.hold_role(role, worker=self.worker)

    # -- the lease --------------------------------------------------------------------------------

    async def _register(self) -> None:
        settings = self._settings
        self._steps.worker = await self._store.register(
            settings.name, self._offers(), parent=settings.parent
        )
        self._lease = Lease(
            self._store,
            self.worker,
            LeaseLimits(
                lease_s=settings.lease_s,
                stall_limit_s=settings.stall_limit_s,
                stuck_grace_s=settings.recycle_grace_s,
            ),
            clock=self._clock,
            lost=self._lease_lost,
            stuck=self._end_process,
            outages=self.outages,
        )

    def _offers(self) -> Offers:
        """Return the message types and channels that this worker announces."""
        return Offers(
            types={
                sub.name: frozenset(self._handlers.types(sub.queue)) for sub in self._subscriptions
            },
            channels=frozenset().union(*(relay.channels for relay in self._extra_relays)),
        )

    def _lease_lost(self) -> None:
        """This worker was declared dead: its runs can no longer commit. Register again."""
        self._flow.lost_worker_id = self.worker.worker_id
        self._executor.cancel_all("lost")
        self._spawn(self._register_again(), "register again")

    async def _register_again(self) -> None:
        old, self._lease = self._lease, None
        if old is not None:
            await asyncio.to_thread(old.close)
        pause = 0.05
        while True:
            try:
                await self._register()
                self.outages.worked("registering again", STORE)
                break
            except StoreError as error:  # the outage that cost the lease may not be over yet
                self.outages.failed("registering again", error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
        log.warning("registered again as worker %d", self.worker.worker_id)

    # -- tasks ------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"ackbone {name}")
        self._tasks.append(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(task.get_name(), error)

    async def _stop_tasks(self, kind: str = "") -> None:
        tasks = [t for t in self._tasks if t.get_name().startswith(f"ackbone {kind}")]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def fail(self, what: str, error: BaseException) -> None:
        """End the worker, because a fetcher, a relay or the settler failed. With one of them
        missing it would hold messages without moving them."""
        if self.failure is None:
            self.failure = error
        log.critical("%s failed, the worker stops", what, exc_info=error)
        self.stopped.set()

    def recycle_soon(self) -> None:
        """Ask for this process to be replaced, because a handler cannot be stopped."""
        self.recycle = True
        self.stopped.set()
