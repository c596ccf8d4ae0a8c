"""The relays of every worker: dead workers, paused queues, cancellations, broker leases, clocks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping

import msgspec

from ackbone.core.broker import (
    Bound,
    Broker,
    Delivery,
    Inherits,
    NamesConsumers,
    Settlement,
    Subscription,
    Verb,
)
from ackbone.core.clock import Clock
from ackbone.core.errors import BrokerUnavailable, ConfigError
from ackbone.core.outcome import ParkKind
from ackbone.core.store import GROUP, Offers, Worker

from .executor import Active
from .flow import Flow, Slots
from .outages import broker_side
from .relays import Relay
from .steps import Steps
from .task_heartbeats import TaskHeartbeats
from .wiring import Ports, WorkerSettings

log = logging.getLogger("ackbone.engine")

INHERIT_S = 0.5
"""How often to ask whether a worker has ended that holds copies of the broker."""
DOUBLE_S = 1.0
"""How often a slow start doubles the slots."""


class WorkerRelays:
    """Makes the relays of one worker."""

    def __init__(
        self,
        ports: Ports,
        steps: Steps,
        flow: Flow,
        settings: WorkerSettings,
        offers: Callable[[], Offers],
    ) -> None:
        """`offers` returns what this worker has handlers and channels for now."""
        self._ports = ports
        self._store = ports.store
        self._clock = ports.clock
        self._steps = steps
        self._flow = flow
        self._settings = settings
        self._offers = offers
        self._store_name: str | None = None
        self._expiry_held_until = 0.0
        self._drift = self._clock.now_us() / 1e6 - self._clock.monotonic()
        self._store_jumps = 0

    def relays(self) -> list[Relay]:
        settings = self._settings
        relays: list[Relay] = []
        if not settings.is_child:
            relays += [
                Relay(name="reaper", every_s=settings.reap_every_s, step=self._reap),
                Relay(name="resolver", every_s=5.0, step=self._resolve),
                Relay(name="parked", every_s=2.0, step=self._resume_parked),
            ]
        relays += [
            Relay(name="clock watch", every_s=0.5, step=self._watch_clock),
            Relay(name="paused queues", every_s=1.0, step=self.read_paused),
            Relay(name="cancelling", every_s=0.5, step=self._cancel_asked),
            Relay(name="queue binding", every_s=settings.lease_s, step=self.bind_queues),
        ]
        if any(sub.protocol is not None for sub in self._flow.subscriptions):
            beats = TaskHeartbeats(
                self._store, self._flow.executor, self._clock, every_s=settings.extend_s
            )
            relays.append(Relay(name="heartbeats", every_s=settings.extend_s, step=beats.step))
        if settings.cautious and self._flow.slots:
            slow_start = SlowStart(self._flow.slots, self._clock)
            relays.append(Relay(name="slots", every_s=0.1, step=slow_start.step))
        leases = [b.capabilities.lease_s for b in self._brokers() if b.capabilities.lease_s]
        if leases:
            every_s = min(min(leases) / 4, settings.extend_s)
            relays.append(Relay(name="leases", every_s=every_s, step=self._extend))
        limits = [b.capabilities.hold_limit_s for b in self._brokers()]
        held_s = [limit for limit in limits if limit is not None]
        if held_s:
            step = self._adopt_long
            relays.append(Relay(name="long runs", every_s=min(held_s) / 4, step=step))
        if any(isinstance(broker, NamesConsumers) for broker in self._brokers()):
            inherit = self._inherit
            relays.append(Relay(name="copies of ended workers", every_s=INHERIT_S, step=inherit))
        return relays

    def _brokers(self) -> list[Broker]:
        """Return the brokers that the subscriptions are on, each once."""
        found = (self._steps.sources.broker(sub) for sub in self._flow.subscriptions)
        return list({id(broker): broker for broker in found if broker is not None}.values())

    # -- running messages -------------------------------------------------------------------------

    async def _extend(self, worker: Worker) -> None:
        """Keep brokers from taking back messages that run here."""
        held: dict[str, tuple[Subscription, list[Delivery]]] = {}
        running = [(active.run, active.sub) for active in self._flow.executor.active]
        for run, sub in (*running, *self._flow.settler.unsettled):
            if run.delivery is not None:
                held.setdefault(sub.name, (sub, []))[1].append(run.delivery)
        sources = self._steps.sources
        await asyncio.gather(*(sources.extend(sub, copies) for sub, copies in held.values()))

    async def _adopt_long(self, worker: Worker) -> None:
        """Take over messages whose runs keep the broker's copy for too long: the store gets the
        whole message, and the broker's copy is acknowledged."""
        now_us = self._clock.now_us()
        long: dict[str, list[Active]] = {}
        for active in self._flow.executor.active:
            broker = self._steps.sources.broker(active.sub)
            limit_s = None if broker is None else broker.capabilities.hold_limit_s
            if active.run.delivery is None or limit_s is None:
                continue
            if now_us - active.run.claimed_at_us >= limit_s / 2 * 1e6:
                long.setdefault(active.sub.name, []).append(active)
        for found in long.values():
            adopted = await self._store.adopt([active.run for active in found], worker=worker)
            acks = []
            for active, ours in zip(found, adopted, strict=True):
                if ours and active.run.delivery is not None:
                    acks.append(Settlement(delivery=active.run.delivery, verb=Verb.ACK))
                    active.run = msgspec.structs.replace(active.run, delivery=None)
            await self._steps.settle(found[0].sub, acks)

    async def _inherit(self, worker: Worker) -> None:
        """Take over what ended workers had received. The store knows of an end long before the
        lease of the broker's copies is over."""
        sources = [
            each for each in self._steps.sources.opened.values() if isinstance(each, Inherits)
        ]
        names = frozenset(itertools.chain.from_iterable(each.holders for each in sources))
        ended = await self._store.ended(names) if names else names
        for source in sources:
            source.take_from(ended.intersection(source.holders))

    async def _cancel_asked(self, worker: Worker) -> None:
        """Cancel runs that an operator or another process wants stopped."""
        executor = self._flow.executor
        if executor.running:
            for tenant_id, subscription, message_id in await self._store.to_cancel(worker=worker):
                executor.cancel(message_id, tenant_id=tenant_id, subscription=subscription)

    # -- messages that wait -----------------------------------------------------------------------

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

    async def _resume_parked(self, worker: Worker) -> None:
        """Resume messages that were parked because no worker had a handler for them."""
        offers = self._offers()
        if offers != worker.offers:  # a handler was registered while this worker runs
            worker = await self._store.announce(worker, offers)
            if worker.worker_id == self._steps.worker.worker_id:
                self._steps.worker = worker
        for subscription, types in offers.types.items():
            if not types:
                continue
            n = await self._store.resume_parked(
                ParkKind.WORKFLOW_PENDING, sorted(types), subscription=subscription, worker=worker
            )
            if n:
                log.info(
                    "resumed %d parked messages of %s: a handler is now registered", n, subscription
                )

    async def read_paused(self, worker: Worker) -> None:
        self._flow.paused = self._settings.paused | await self._store.paused()

    async def bind_queues(self, worker: Worker) -> None:
        """Record at the broker which store the workers of these queues use.

        Idempotency keys hold within one store: workers with another store would run the messages a
        second time. Raises ConfigError if such workers read one of the queues.
        """
        bound: list[tuple[Subscription, Bound]] = []
        for sub in self._flow.subscriptions:
            broker: object = self._steps.sources.broker(sub)
            if isinstance(broker, Bound):
                bound.append((sub, broker))
        if not bound:
            return
        if self._store_name is None:
            self._store_name = await self._store.identity()
        for_s = 3 * self._settings.lease_s
        for sub, at in bound:
            try:
                other = await at.bind(sub, self._store_name, for_s=for_s)
            except BrokerUnavailable as error:
                subs = self._flow.subscriptions
                brokers: list[object] = [self._steps.sources.broker(each) for each in subs]
                if worker.worker_id == 0 and all(each is at for each in brokers):
                    raise  # the start of a worker that could do nothing
                side = broker_side(sub.broker)
                self._flow.unbound.add(sub.name)
                self._steps.outages.failed("binding queues", error, asks_again=False, broker=side)
                continue
            self._flow.unbound.discard(sub.name)
            if other is not None:
                raise ConfigError(
                    [
                        f"queue {sub.queue}, group {sub.group}: workers with another store "
                        f"({other}) read it, and this one ({self._store_name}) would run its "
                        "messages a second time. Let all workers share one store (store: "
                        "postgresql://…, or on one machine the same SQLite file), or read the "
                        "queue with another `group`. If those workers are gone, wait "
                        f"{for_s:.0f} s"
                    ]
                )

    # -- clocks -----------------------------------------------------------------------------------

    async def _watch_clock(self, worker: Worker) -> None:
        """Let nothing expire for a while after somebody set the clock: wall clock and monotonic
        clock drift apart then."""
        drift = self._clock.now_us() / 1e6 - self._clock.monotonic()
        if abs(drift - self._drift) > 1.0:
            self._hold_expiry(f"the clock jumped by {drift - self._drift:.0f} s")
        self._drift = drift
        jumps = self._store.clock_jumps
        if jumps != self._store_jumps:
            self._hold_expiry("the clock of the store's server jumped")
        self._store_jumps = jumps
        self._store.expiry_paused = self._clock.monotonic() < self._expiry_held_until

    def _hold_expiry(self, why: str) -> None:
        hold_s = self._settings.clock_hold_s
        self._expiry_held_until = self._clock.monotonic() + hold_s
        log.warning("%s: nothing expires for the next %.0f s", why, hold_s)


class SlowStart:
    """Few slots at first, for a worker whose predecessor crashed: a small group over all queues
    together, but at least one slot each. They double every second up to the configured number.

    The message that killed the last process is likely to run again in this one. Few slots keep it
    from taking many other runs along.
    """

    def __init__(self, slots: Mapping[str, Slots], clock: Clock) -> None:
        self._slots = slots
        self._clock = clock
        self._full = {name: each.size for name, each in slots.items()}
        self._doubled_at = clock.monotonic()
        for each in slots.values():
            each.size = min(each.size, max(1, GROUP // len(slots)))

    async def step(self, worker: Worker) -> None:
        """Double the slots if it is time to."""
        now = self._clock.monotonic()
        if now - self._doubled_at < DOUBLE_S:
            return
        self._doubled_at = now
        for name, each in self._slots.items():
            each.widen(min(self._full[name], each.size * 2))
