"""Receive, decode, claim: as many messages as there are free slots, in batches.

Three small loops: `FusedFetcher` where queue and store are one file, else `BrokerFetcher` for new
messages and `StoreFetcher` for what the store itself holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ackbone.core.broker import (
    Broker,
    Delivery,
    Durability,
    Settlement,
    Subscription,
    TakesOver,
    Verb,
)
from ackbone.core.errors import BrokerError, StoreError
from ackbone.core.store import (
    Answer,
    Candidate,
    Claims,
    Company,
    Decode,
    Fused,
    Run,
    Taken,
    Verdict,
    Worker,
)

from .outages import BROKER, STORE, Outages

T = TypeVar("T")

NET_S = 1.0
"""How often a waiting fetcher looks by itself, should a wake-up get lost."""
RECEIVE_WAIT_S = 1.0
SMALLEST_HALF = 100
"""Smaller batches would cost more in commits than it spares that two threads work at once."""
CLAIMS = 2
"""Batches that wait for the store's answer at a time. With one the store would idle while its runs
begin, before anybody comes to ask for the next."""
LAST_ANSWER_S = 2.0
"""How long a fetcher that is stopped waits for the answer to what it asked."""


class Slots:
    """Room for runs of one subscription; fetchers wait for it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def free(self) -> int:
        return self.size - self.taken

    def take(self, n: int) -> None:
        self.taken += n
        if self.taken >= self.size:
            self._room.clear()

    def give(self, n: int) -> None:
        was_full = self.taken >= self.size
        self.taken -= n
        if was_full and self.taken < self.size:
            self._room.set()

    def widen(self, size: int) -> None:
        """Make room for more runs."""
        self.size = max(self.size, size)
        if self.taken < self.size:
            self._room.set()

    async def room(self) -> int:
        """Waits until there is at least one free slot; returns how many."""
        while self.free <= 0:  # woken, and another one was faster
            await self._room.wait()
        return self.free

    async def reserve(self, wanted: int) -> int:
        """Waits for a free slot, takes up to `wanted` of them and returns how many it took."""
        taken = min(wanted, await self.room())
        self.take(taken)
        return taken


class Lane(Protocol):
    """What a fetcher needs of its worker."""

    worker: Worker

    def may_fetch(self, sub: Subscription) -> float:
        """0: go on; else seconds to hold back (paused, draining, breaker, store away)."""
        ...

    def start(self, runs: Sequence[Run], sub: Subscription) -> int:
        """Returns how many of them begin: one that goes on here already does not."""
        ...

    def seen(self, sub: Subscription, verdicts: Sequence[Verdict]) -> None:
        """A batch of which not every message is to be run."""
        ...

    def unclaimed(self, sub: Subscription, messages: int) -> None:
        """Messages in our hands that the store, being away, cannot decide about."""
        ...


class _Loop:
    """The shape all fetchers share: wait for room, fetch, start, wait for work."""

    def __init__(
        self,
        sub: Subscription,
        store: Claims,
        slots: Slots,
        worker: Lane,
        outages: Outages | None = None,
    ) -> None:
        self.sub = sub
        self._store = store
        self._slots = slots
        self._worker = worker
        self._outages = outages or Outages()
        self._asks_for = f"fetching from {sub.queue} ({self._speaks_to})"

    async def run(self) -> None:
        woken = self._store.subscribe()
        pause = 0.05
        try:
            while True:
                limit = self._at_once(await self._slots.room())
                woken.clear()  # before a hold, too: waiting for what is set would spin for ever
                hold = self._worker.may_fetch(self.sub)
                if hold > 0:
                    await _wait(woken, min(hold, NET_S))
                    continue
                try:
                    found, next_due_s = await self._fetch(limit)
                    pause = 0.05
                    self._outages.worked(self._asks_for, self._speaks_to)
                except (StoreError, BrokerError) as error:
                    self._outages.failed(self._asks_for, error)
                    await asyncio.sleep(pause)
                    pause = min(2.0, pause * 2)
                    continue
                if found < limit and self._waits:
                    wait = NET_S if next_due_s is None else min(NET_S, max(0.001, next_due_s))
                    await _wait(woken, wait)
        finally:
            self._store.unsubscribe(woken)

    _waits = True
    _speaks_to = STORE

    def _at_once(self, free: int) -> int:
        """How many to ask for, of so many free slots.

        In two halves, if there is room for both: the loop runs one while the other is written, and
        no fetcher keeps all slots while it waits for the store.
        """
        return min(free, max(SMALLEST_HALF, self._slots.size // 2))

    async def _fetch(self, limit: int) -> tuple[int, float | None]:
        raise NotImplementedError

    def _start(self, verdicts: Sequence[Verdict]) -> int:
        granted = Answer.RUN
        runs = [v.run for v in verdicts if v.run is not None and v.answer is granted]
        started = self._worker.start(runs, self.sub)
        if len(runs) < len(verdicts):
            self._worker.seen(self.sub, verdicts)
        return started


class FusedStore(Claims, Fused, Protocol):
    """A store that shares its database with the broker."""


class FusedFetcher(_Loop):
    """One file: taking a message and claiming it is one commit."""

    def __init__(
        self,
        sub: Subscription,
        store: FusedStore,
        decode: Decode,
        slots: Slots,
        worker: Lane,
        outages: Outages | None = None,
    ) -> None:
        super().__init__(sub, store, slots, worker, outages)
        self._fused = store
        self._decode = decode

    async def _fetch(self, limit: int) -> tuple[int, float | None]:
        taken: Taken = await _answered(
            self._fused.take(self.sub, self._decode, limit=limit, worker=self._worker.worker)
        )
        self._slots.take(self._start(taken.verdicts))
        return len(taken.verdicts), taken.next_due_s


class StoreFetcher(_Loop):
    """Work that the store holds: retries, resumed, adopted, lane heads."""

    def __init__(
        self,
        sub: Subscription,
        store: Claims,
        slots: Slots,
        worker: Lane,
        outages: Outages | None = None,
        *,
        company: Company = Company.ANY,
    ) -> None:
        super().__init__(sub, store, slots, worker, outages)
        self._company = company

    async def _fetch(self, limit: int) -> tuple[int, float | None]:
        if self._company is not Company.ANY:
            # Wake-ups are for all processes, and most are not about suspects: look before a write.
            waiting = await self._store.suspects([self.sub.name], worker=self._worker.worker)
            if not (waiting.few if self._company is Company.FEW else waiting.none):
                return 0, None
        reserved = await self._slots.reserve(limit)
        started = 0
        try:
            verdicts = await _answered(
                self._store.claim_ready(
                    self.sub, limit=reserved, worker=self._worker.worker, company=self._company
                )
            )
            started = self._start(verdicts)
        finally:
            self._slots.give(reserved - started)
        return len(verdicts), await self._store.next_due_s(self.sub)


class BrokerFetcher(_Loop):
    """New messages of a broker with a life of its own."""

    _waits = False  # receive() itself waits
    _speaks_to = BROKER

    def __init__(
        self,
        sub: Subscription,
        store: Claims,
        broker: Broker,
        decode: Decode,
        slots: Slots,
        worker: Lane,
        settle: Callable[[Subscription, Sequence[Settlement]], Awaitable[object]],
        outages: Outages | None = None,
    ) -> None:
        super().__init__(sub, store, slots, worker, outages)
        self._broker = broker
        self._decode = decode
        self._settle = settle
        self._reads_as: int | None = None
        """The worker number under which this became the one reader of an ordered source."""
        self._claiming: deque[asyncio.Task[None]] = deque()
        """Large batches that are being claimed, the oldest first."""

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            for claiming in self._claiming:
                claiming.cancel()
            if self._claiming:
                await asyncio.wait(self._claiming)
            for ended in self._claiming:
                if not ended.cancelled():
                    ended.result()  # raises its error, should it have one

    async def _fetch(self, limit: int) -> tuple[int, float | None]:
        if self.sub.ordered and not await self._is_the_fetcher():
            await asyncio.sleep(NET_S)
            return 0, None
        self._claims_ended()  # an error need not wait for the next message
        limit = min(limit, self._broker.capabilities.max_batch)
        deliveries = await self._broker.receive(self.sub, limit=limit, wait=RECEIVE_WAIT_S)
        if not deliveries:
            return 0, None
        unclaimed = [self._decode(delivery) for delivery in deliveries]
        try:
            await self._room_for_a_claim()
            # Claimed when there is a slot: the other fetcher takes some, too.
            reserved = await self._slots.reserve(len(unclaimed))
            admitting, unclaimed = self._admit(unclaimed, reserved), []
            if self.sub.ordered or len(deliveries) < SMALLEST_HALF:
                await admitting
            else:  # the loop reads the next ones meanwhile, if there are slots for them
                self._claiming.append(asyncio.create_task(admitting, name="ackbone-claim"))
                await asyncio.sleep(0)  # cancelled before its first step it would release nothing
        finally:
            await self._release([candidate.delivery for candidate in unclaimed])
        return len(deliveries), None

    async def _room_for_a_claim(self) -> None:
        """The store claims one batch after the other, and has the next at hand when one is done."""
        self._claims_ended()
        if len(self._claiming) >= CLAIMS:
            await asyncio.wait({self._claiming[0]})
            self._claims_ended()

    def _claims_ended(self) -> None:
        """Forget those that are done; raises the error of one that has one."""
        while self._claiming and self._claiming[0].done():
            self._claiming.popleft().result()

    async def _admit(self, unclaimed: Sequence[Candidate], reserved: int) -> None:
        """Claim and start them. `reserved`: so many slots are theirs already."""
        try:
            while True:
                started = 0
                try:
                    verdicts = await self._claimed(unclaimed[:reserved])
                    unclaimed = unclaimed[reserved:]
                    started = self._start(verdicts)
                finally:
                    self._slots.give(reserved - started)
                await self._acknowledge(verdicts)
                if not unclaimed:
                    return
                reserved = await self._slots.reserve(len(unclaimed))
        finally:
            await self._release([candidate.delivery for candidate in unclaimed])

    async def _release(self, deliveries: Sequence[Delivery]) -> None:
        """Stopped with messages in hand: nobody else would see them while this process lives."""
        back = [Settlement(delivery=delivery, verb=Verb.RELEASE) for delivery in deliveries]
        if back:
            await self._settle(self.sub, back)

    async def _is_the_fetcher(self) -> bool:
        """An ordered source has one reader: what two have read comes in no order any more."""
        able = self._broker.capabilities
        if able.durability is Durability.NONE and able.lease_s is None:
            return True  # in memory: this process's own, whoever reads elsewhere
        worker = self._worker.worker
        if await self._store.adopt_in_order(self.sub, [], worker=worker) is None:
            self._reads_as = None
            return False
        if self._reads_as != worker.worker_id:
            broker: object = self._broker
            if isinstance(broker, TakesOver):
                await broker.take_over(self.sub)
            self._reads_as = worker.worker_id
        return True

    async def _acknowledge(self, verdicts: Sequence[Verdict]) -> None:
        """What will not run here needs its broker copy no more; the reason is the verdict."""
        granted = Answer.RUN
        others = [
            (verdict.delivery, verdict.answer)
            for verdict in verdicts
            if verdict.answer is not granted and verdict.delivery is not None
        ]
        acks = [
            Settlement(delivery=delivery, verb=Verb.ACK, reason=answer)
            for delivery, answer in others
            if answer is not Answer.LEAVE
        ]
        if acks:
            await self._settle(self.sub, acks)
        await self._release([delivery for delivery, answer in others if answer is Answer.LEAVE])

    async def _claimed(self, candidates: Sequence[Candidate]) -> Sequence[Verdict]:
        """The verdicts of the store, however long it is away."""
        claiming = f"claiming from {self.sub.queue}"
        pause = 0.05
        while True:
            try:
                verdicts = await self._verdicts(candidates)
                self._outages.worked(claiming, STORE)
                return verdicts
            except StoreError as error:
                # The messages are in our hands and not claimed: ask again, settle nothing.
                self._outages.failed(claiming, error)
                self._worker.unclaimed(self.sub, len(candidates))
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)

    async def _verdicts(self, candidates: Sequence[Candidate]) -> Sequence[Verdict]:
        """Keyed messages go into their lanes, in broker order; the others are claimed."""
        worker = self._worker.worker  # asked anew: it may have been declared dead meanwhile
        if not self.sub.ordered:
            return await _answered(self._store.claim(self.sub, candidates, worker=worker))
        keyed = [c for c in candidates if c.message and c.message.ordering_key]
        free = [c for c in candidates if not (c.message and c.message.ordering_key)]
        verdicts: list[Verdict] = []
        if keyed:
            adopted = await self._store.adopt_in_order(self.sub, keyed, worker=worker)
            verdicts += adopted or [
                Verdict(answer=Answer.LEAVE, delivery=c.delivery) for c in keyed
            ]
        if free:
            verdicts += await _answered(self._store.claim(self.sub, free, worker=worker))
        return verdicts


async def _answered(claim: Coroutine[Any, Any, T]) -> T:
    """The answer of a claim, even if this fetcher is stopped meanwhile: it stops right after.

    The store makes a claim that it was asked for, whether anybody still waits or not. What is never
    heard of is handed back when the worker signs off; what is heard of may still be run.
    """
    asked = asyncio.ensure_future(claim)
    try:
        return await asyncio.shield(asked)
    except asyncio.CancelledError:
        me = asyncio.current_task()
        await asyncio.wait({asked}, timeout=LAST_ANSWER_S)
        if me is None or not asked.done() or asked.cancelled():
            asked.cancel()
            raise
        me.cancel()  # at its next await
        return asked.result()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    if event.is_set():
        return
    try:
        # Not wait_for: before Python 3.12 it drops a cancellation that meets the event, and a
        # drain would wait for this loop for ever.
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
