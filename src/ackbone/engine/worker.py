"""One worker: registers with the store, fetches, runs, settles, and hands back what it must."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import StrEnum
from typing import Any, NoReturn, Protocol

import msgspec

from ackbone.core.broker import Broker, Delivery, Extends, Subscription
from ackbone.core.clock import Clock
from ackbone.core.errors import StoreError
from ackbone.core.meter import Meter
from ackbone.core.outcome import Park, ParkKind, Released, Retry
from ackbone.core.store import (
    GROUP,
    Answer,
    Claims,
    Commit,
    Company,
    Finished,
    Offers,
    Run,
    RunWrites,
    Verdict,
    Worker,
)

from .binding import Binding
from .decoder import decoder
from .executor import Executor
from .fetcher import BrokerFetcher, FusedFetcher, Slots, StoreFetcher
from .handlers import Handlers
from .lease import Lease
from .outages import STORE, Outages
from .pulse import Pulse
from .ramp import Ramp
from .relays import Relay, run_relay, step_once
from .settler import Settler
from .stages import stage, tell_parked
from .twins import Twins
from .watchdog import Watchdog

log = logging.getLogger("ackbone.engine")


FIRST_STEPS_S = 1.0
"""Relays that step no more often than this begin so late in the process after a crash: together
they cost as much as its start."""


class Phase(StrEnum):
    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker behaves. Seconds throughout."""

    slots: int = 100
    lease_s: float = 10.0
    reap_every_s: float = 0.5
    crash_budget: int = 2
    shutdown_timeout_s: float = 30.0
    stall_limit_s: float = 60.0
    recycle_grace_s: float = 10.0
    clock_hold_s: float = 300.0
    max_message_bytes: int | None = None
    extend_s: float = 30.0
    """At least so often a broker with leases, and the ledger of tasks, hear of what runs."""
    company: Company = Company.ANY
    """Which messages to run. A child process runs suspects: a small group or one at a time of all
    queues together, each in the slot of another one whose end is committed."""
    cautious: bool = False
    """Begin with few slots, because the process before this one crashed."""
    parent: str | None = None
    """The process that started this one, as the store knows it."""

    @property
    def is_child(self) -> bool:
        return self.company is not Company.ANY


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended."""

    finished: int
    handed_back: int


class WorkerStore(Claims, RunWrites, Protocol):
    """What a worker needs of its store."""


class EngineWorker:
    """The engine of one process. `start`, then `drain` (orderly) or `abandon` (lease lost)."""

    def __init__(  # noqa: PLR0913 - wiring: each one is a port or a limit
        self,
        *,
        name: str,
        store: WorkerStore,
        broker: Broker,
        fused: bool,
        handlers: Handlers,
        subscriptions: Sequence[Subscription],
        slots: Mapping[str, int] | None = None,
        paused: frozenset[str] = frozenset(),
        make_executor: Callable[..., Executor],
        clock: Clock,
        settings: WorkerSettings,
        relays: Sequence[Relay] = (),
        meter: Meter | None = None,
        end_process: Callable[[], NoReturn] | None = None,
        on_work: Callable[[], None] | None = None,
    ) -> None:
        """`end_process` is called when the event loop is stuck for good. Without it the lease is
        given up and the process left alone: it is somebody else's. `on_work` is called once, before
        the first run begins."""
        self._name = name
        self._store = store
        self._broker = broker
        self._fused = fused
        self._handlers = handlers
        self._subscriptions = list(subscriptions)
        self._clock = clock
        self._settings = settings
        self._extra_relays = list(relays)
        self._meter = meter
        self._end_process = end_process
        self.outages = Outages(clock)
        self._on_work = on_work
        self._executor = make_executor(done=self._ended, on_stuck=self._stuck)
        self._settler = Settler(
            store,
            None if fused else broker,
            lambda: self.worker,
            committed=self._committed,
            fenced=self._fenced,
            failed=lambda error: self._fail("the settler", error),
            outages=self.outages,
        )
        shared = Slots(GROUP if settings.company is Company.FEW else 1)
        self._slots = {
            sub.name: shared
            if settings.is_child
            else Slots((slots or {}).get(sub.name, settings.slots))
            for sub in self._subscriptions
        }
        self._ramp = Ramp(self._slots, clock) if settings.cautious and self._slots else None
        self._twins = Twins() if store.forgets_claims else None
        self._pulse = Pulse(self._executor, store, clock, every_s=settings.extend_s)
        self._binding = Binding(
            store, None if fused else broker, self._subscriptions, for_s=3 * settings.lease_s
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._fetchers: list[FusedFetcher | BrokerFetcher | StoreFetcher] = []
        self._kept_paused = paused
        """Paused by configuration, whatever an operator says."""
        self._paused = paused
        self._halted = False
        self._lease: Lease | None = None
        self._watchdog: Watchdog | None = None
        self._lost = 0
        """The number that was declared dead last."""
        self._jump_until = 0.0
        self._drift = clock.now_us() / 1e6 - clock.monotonic()
        self._store_jumps = 0
        self.phase = Phase.NEW
        self.worker = Worker(worker_id=0, name=name)
        self.recycle = False
        """True: a handler cannot be ended; this process should be replaced."""
        self.stopped = asyncio.Event()
        self.finished = 0
        self.failure: BaseException | None = None

    # -- life -------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Register and begin to fetch."""
        if self.phase is not Phase.NEW:
            raise RuntimeError("the worker was started before")
        await self._binding.step(self.worker)
        await self._register()
        self.phase = Phase.RUNNING
        self._watchdog = Watchdog(lambda: self._executor.active, self._clock)
        await self._read_paused(self.worker)
        for sub in self._subscriptions:
            self._fetchers += self._fetchers_of(sub)
        for fetcher in self._fetchers:
            self._spawn(fetcher.run(), f"fetch {fetcher.sub.name}")
        # A process that may die soon does first what cannot wait.
        hurried = self._settings.cautious or self._settings.is_child
        for relay in (*self._own_relays(), *self._extra_relays):
            waits = hurried and relay.bell is None and relay.every_s >= FIRST_STEPS_S
            after_s = FIRST_STEPS_S if waits else 0.0
            self._spawn(run_relay(relay, self, self.outages, after_s=after_s), relay.name)

    async def drain(
        self, timeout_s: float | None = None, *, outlast_threads: bool = False
    ) -> Drained:
        """Stop fetching, let runs finish up to the limit, hand back the rest. Idempotent.

        `outlast_threads`: this process goes on. A plain handler, which nothing can stop, is waited
        for however long it takes: handed back, its message would run beside it.
        """
        if self.phase in (Phase.STOPPED, Phase.NEW):
            self.phase = Phase.STOPPED
            self.stopped.set()
            return Drained(finished=self.finished, handed_back=0)
        limit = self._settings.shutdown_timeout_s if timeout_s is None else timeout_s
        self.phase = Phase.DRAINING
        await self._stop_tasks("fetch")
        if self._executor.running:
            await self._leave(running=True)  # a kill from now on is no crash of a message
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
            # The process is gone before the next attempt: what follows takes a lease at most.
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

    def is_idle(self) -> bool:
        """Nothing running, nothing waiting to be committed or told."""
        return self._executor.running == 0 and self._settler.waiting == 0

    @property
    def running(self) -> int:
        return self._executor.running

    def serving(self) -> dict[str, int]:
        """By queue, the slots that take messages: none while stopped or paused."""
        open_to_all = self.phase is Phase.RUNNING and not self._halted
        found: dict[str, int] = {}
        for sub in self._subscriptions:
            taking = open_to_all and sub.name not in self._paused
            found[sub.queue] = found.get(sub.queue, 0) + taking * self._slots[sub.name].size
        return found

    def pause(self) -> None:
        """Begin nothing new in this worker; what runs goes on."""
        self._halted = True

    def resume(self) -> None:
        """Take up again what `pause` held back."""
        self._halted = False

    def cancel(self, message_id: str) -> bool:
        """Ask a running message to stop."""
        return self._executor.cancel(message_id)

    # -- what fetchers ask ------------------------------------------------------------------------

    def may_fetch(self, sub: Subscription) -> float:
        if self._halted:
            return 0.05
        if self.phase is not Phase.RUNNING or sub.name in self._paused:
            return 1.0
        if self._settler.behind > self._slots[sub.name].size:
            return 0.05
        return self._executor.breaker_wait_s(sub.queue) or 0.0

    def start(self, runs: Sequence[Run], sub: Subscription) -> int:
        if self._twins is not None:
            runs = [run for run in runs if self._twins.begin(run)]
        if runs and self._on_work is not None:
            self._on_work()
            self._on_work = None
        if log.isEnabledFor(logging.DEBUG):
            for run in runs:
                stage("message.consumed", run)
                stage("message.parsed", run)
        # A claim that was answered after the lease was lost: what it granted is somebody else's.
        late = bool(runs) and runs[0].token.worker_id == self._lost
        self._executor.start(runs, sub, cause="lost" if late else "")
        return len(runs)

    def seen(self, sub: Subscription, verdicts: Sequence[Verdict]) -> None:
        if self._meter is not None:
            copies = sum(verdict.answer in _COPIES for verdict in verdicts)
            if copies:
                self._meter.recognized(sub.queue, copies)
        parked = [v.run for v in verdicts if v.answer is Answer.PARKED and v.run is not None]
        if parked:
            types = sorted({run.message.type for run in parked})
            log.warning(
                "no living worker has a handler for %s: parked message %s of queue %s%s until one"
                " starts. See: ackbone parked list",
                ", ".join(types[:5]) + (" and others" if len(types) > 5 else ""),
                parked[0].message.id,
                sub.queue,
                f" and {len(parked) - 1} more" if len(parked) > 1 else "",
            )

    def unclaimed(self, sub: Subscription, messages: int) -> None:
        if self._meter is not None:
            self._meter.dedup_unavailable(sub.queue, messages)

    # -- ends of runs -----------------------------------------------------------------------------

    def _ended(self, finished: Finished, sub: Subscription) -> None:
        """The run is over: its slot is free for the next, its outcome waits for its commit.

        Not so of a suspect: the next one may kill the process, and what is not committed with it.
        """
        if not self._settings.is_child:
            self._slots[sub.name].give(1)
        self._settler.add(finished, sub)

    def _committed(self, items: Sequence[Finished], commits: Sequence[Commit]) -> None:
        fenced = Commit.FENCED
        done = [
            finished
            for finished, commit in zip(items, commits, strict=True)
            if commit is not fenced
        ]
        if self._settings.is_child:
            for finished in done:
                self._slots[finished.run.subscription].give(1)
        if self._twins is not None:
            for finished in done:
                self._twins.end(finished.run)
        if self._meter is not None:
            self._meter.ran(done)
        if log.isEnabledFor(logging.DEBUG):
            for finished in done:
                stage("message.executed", finished.run)
                stage("message.acked", finished.run)
        ended = sum([type(finished.outcome) not in _NOT_ENDED for finished in done])
        if ended < len(done):
            for finished in done:
                if type(finished.outcome) is Park:
                    tell_parked(finished.run, finished.outcome)
        if ended:
            self.finished += ended
            log.info("finished %d %s", ended, "message" if ended == 1 else "messages")

    def _fenced(self, finished: Finished, sub: Subscription) -> None:
        run = finished.run
        if self._settings.is_child:
            self._slots[sub.name].give(1)
        second = None if self._twins is None else self._twins.end(run)
        if run.token.worker_id != self.worker.worker_id:
            return
        log.warning("message %s: dropped, its claim is gone", run.message.id)
        if second is not None:
            self._slots[sub.name].take(self.start([second], sub))

    # -- the lease --------------------------------------------------------------------------------

    async def _register(self) -> None:
        self.worker = await self._store.register(
            self._name, self._offers(), parent=self._settings.parent
        )
        self._lease = Lease(
            self._store,
            self.worker,
            lease_s=self._settings.lease_s,
            stall_limit_s=self._settings.stall_limit_s,
            stuck_grace_s=self._settings.recycle_grace_s,
            clock=self._clock,
            lost=self._lease_lost,
            stuck=self._end_process,
            outages=self.outages,
        )

    def _offers(self) -> Offers:
        """What this worker has handlers and channels for."""
        return Offers(
            types={
                sub.name: frozenset(self._handlers.types(sub.queue)) for sub in self._subscriptions
            },
            channels=frozenset().union(*(relay.channels for relay in self._extra_relays)),
        )

    def _lease_lost(self) -> None:
        """Declared dead: whatever runs can no longer commit. Begin anew under a new number."""
        self._lost = self.worker.worker_id
        self._executor.cancel_all("lost")
        self._spawn(self._again(), "register again")

    async def _again(self) -> None:
        old, self._lease = self._lease, None
        if old is not None:
            await asyncio.to_thread(old.close)
        pause = 0.05
        while True:
            try:
                await self._register()
                self.outages.worked("registering again", STORE)
                break
            except StoreError as error:  # what cost the lease may not be over yet
                self.outages.failed("registering again", error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
        log.warning("registered again as worker %d", self.worker.worker_id)

    def _stuck(self, run: Run) -> None:
        self.recycle = True
        self.stopped.set()

    # -- relays -----------------------------------------------------------------------------------

    def _own_relays(self) -> list[Relay]:
        settings = self._settings
        upkeep = [
            Relay(name="reaper", every_s=settings.reap_every_s, step=self._reap),
            Relay(name="resolver", every_s=5.0, step=self._resolve),
            Relay(name="parked", every_s=2.0, step=self._resume_parked),
        ]
        return [
            *([] if settings.is_child else upkeep),
            Relay(name="clock watch", every_s=0.5, step=self._watch_clock),
            Relay(name="paused queues", every_s=1.0, step=self._read_paused),
            Relay(name="cancelling", every_s=0.5, step=self._cancel_asked),
            Relay(name="binding", every_s=settings.lease_s, step=self._binding.step),
            Relay(name="pulse", every_s=settings.extend_s, step=self._pulse.step),
            *self._lease_relays(),
            *(
                []
                if self._ramp is None
                else [Relay(name="slots", every_s=0.1, step=self._ramp.step)]
            ),
        ]

    def _lease_relays(self) -> list[Relay]:
        """Where the broker takes back what it hears nothing of, it hears of what runs here."""
        broker: object = self._broker
        lease_s = self._broker.capabilities.lease_s
        if self._fused or lease_s is None or not isinstance(broker, Extends):
            return []

        async def extend(worker: Worker) -> None:
            held: dict[str, tuple[Subscription, list[Delivery]]] = {}
            running = [(active.run, active.sub) for active in self._executor.active]
            for run, sub in (*running, *self._settler.unsettled):
                if run.delivery is not None:
                    held.setdefault(sub.name, (sub, []))[1].append(run.delivery)
            for sub, deliveries in held.values():
                await broker.extend(sub, deliveries)

        return [
            Relay(name="leases", every_s=min(lease_s / 4, self._settings.extend_s), step=extend)
        ]

    async def _reap(self, worker: Worker) -> None:
        found = await self._store.reap(
            worker=worker,
            lease_s=self._settings.lease_s,
            crash_budget=self._settings.crash_budget,
        )
        if found.workers:
            log.warning(
                "workers %s are gone: %d messages given back, %d dead-lettered (crash_budget)",
                list(found.workers),
                found.tasks,
                found.quarantined,
            )

    async def _resolve(self, worker: Worker) -> None:
        await self._store.resolve(worker=worker)

    async def _read_paused(self, worker: Worker) -> None:
        self._paused = self._kept_paused | await self._store.paused()

    async def _cancel_asked(self, worker: Worker) -> None:
        """Somebody elsewhere wants a run stopped."""
        if self._executor.running:
            for tenant_id, subscription, message_id in await self._store.to_cancel(worker=worker):
                self._executor.cancel(message_id, tenant_id=tenant_id, subscription=subscription)

    async def _resume_parked(self, worker: Worker) -> None:
        """A handler that was missing is here now: what waited for it goes on."""
        offers = self._offers()
        if offers != worker.offers:  # registered while this worker runs
            worker = await self._store.announce(worker, offers)
            if worker.worker_id == self.worker.worker_id:
                self.worker = worker
        for sub in self._subscriptions:
            types = self._handlers.types(sub.queue)
            if types:
                n = await self._store.resume_parked(
                    ParkKind.WORKFLOW_PENDING, types, subscription=sub.name, worker=worker
                )
                if n:
                    log.info("resumed %d parked messages of %s: a handler is here", n, sub.name)

    async def _watch_clock(self, worker: Worker) -> None:
        """Wall and steady clock drift apart: someone set the clock. Nothing expires for a while."""
        drift = self._clock.now_us() / 1e6 - self._clock.monotonic()
        if abs(drift - self._drift) > 1.0:
            self._hold_expiry(f"the clock jumped by {drift - self._drift:.0f} s")
        self._drift = drift
        jumps = self._store.clock_jumps
        if jumps != self._store_jumps:
            self._hold_expiry("the clock of the store's server jumped")
        self._store_jumps = jumps
        self._store.expiry_paused = self._clock.monotonic() < self._jump_until

    def _hold_expiry(self, why: str) -> None:
        hold_s = self._settings.clock_hold_s
        self._jump_until = self._clock.monotonic() + hold_s
        log.warning("%s: nothing expires for the next %.0f s", why, hold_s)

    async def hold_role(self, role: str) -> bool:
        return await self._store.hold_role(role, worker=self.worker)

    # -- tasks ------------------------------------------------------------------------------------

    def _fetchers_of(self, sub: Subscription) -> list[FusedFetcher | BrokerFetcher | StoreFetcher]:
        slots, outages = self._slots[sub.name], self.outages
        if self._settings.is_child:
            company = self._settings.company
            return [StoreFetcher(sub, self._store, slots, self, outages, company=company)]
        decode = decoder(sub, max_bytes=self._settings.max_message_bytes)
        if self._fused:
            fused: Any = self._store
            return [FusedFetcher(sub, fused, decode, slots, self, outages)]
        settle = self._settler.settle
        return [
            BrokerFetcher(sub, self._store, self._broker, decode, slots, self, settle, outages),
            StoreFetcher(sub, self._store, slots, self, outages),
        ]

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"ackbone {name}")
        self._tasks.append(task)
        task.add_done_callback(self._side_task_ended)

    def _side_task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(task.get_name(), error)

    def _fail(self, what: str, error: BaseException) -> None:
        """A fetcher, a relay or the settler that dies ends the worker: half a worker is worse than
        none."""
        if self.failure is None:
            self.failure = error
        log.critical("%s failed, the worker stops", what, exc_info=error)
        self.stopped.set()

    async def _stop_tasks(self, kind: str = "") -> None:
        tasks = [t for t in self._tasks if t.get_name().startswith(f"ackbone {kind}")]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _settle_all(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.lease_s):
                await self._settler.drain()
        left = self._settler.stop()
        if left:
            log.error("%d finished runs could not be committed; they will run again", left)

    async def _last_steps(self) -> None:
        """What relays would leave undone: the last counts, the last anchor, the last replies."""
        try:
            async with asyncio.timeout(self._settings.lease_s):
                for relay in self._extra_relays:
                    if relay.at_end:
                        await step_once(relay, self, self.outages, last=True)
        except Exception:
            log.exception("the worker stops, but a last step failed")

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

    async def _leave(self, *, running: bool) -> None:
        try:
            await self._store.leave(self.worker, running=running)
        except StoreError as error:
            log.warning("worker %d could not sign off: %s", self.worker.worker_id, error)


_NOT_ENDED = frozenset({Retry, Park, Released})
"""Outcomes after which a message waits for another attempt or for somebody."""
_COPIES = frozenset({Answer.FINAL, Answer.ADOPTED, Answer.KNOWN})
