"""Fetchers: the loops that bring messages into a worker, as many as there are free slots.

`TakeFetcher` where queue and store are one database. Otherwise `BrokerFetcher` for new messages and
`StoreFetcher` for messages that the store holds. What they do with a batch is in `steps.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ackbone.core.broker import Delivery, Durability, Settlement, Subscription, TakesOver, Verb
from ackbone.core.errors import BrokerError, StoreError
from ackbone.core.store import Answer, Candidate, Company, Verdict

from .outages import STORE, broker_side
from .steps import Steps

if TYPE_CHECKING:
    from .flow import Flow, Slots

LONG_HOLD_S = 0.5
"""Messages that were read from the broker are handed back for a hold of this length."""
NET_S = 1.0
"""How often a waiting fetcher looks by itself, in case a wake-up got lost."""
SMALLEST_HALF = 100
"""The smallest batch that is worth splitting. Below it the additional commit costs more than two
threads that work at the same time save."""
CLAIMS = 2
"""Batches that wait for the store's answer at the same time. With one, the store would be idle
while the runs of the last batch start."""


class _Fetcher:
    """The loop that all fetchers share: wait for a free slot, fetch a batch, wait for work."""

    waits = True
    """False if fetching itself waits for messages."""

    def __init__(self, sub: Subscription, steps: Steps, slots: Slots, flow: Flow) -> None:
        self.sub = sub
        self._steps = steps
        self._slots = slots
        self._flow = flow
        self._broker = broker_side(sub.broker)
        self._asks = STORE if self.waits else self._broker
        """Whom the last fetch certainly asked: the store or the broker."""
        self._activity = f"fetching from {sub.queue} ({self._asks})"

    async def run(self) -> None:
        store, outages = self._steps.store, self._steps.outages
        woken = store.subscribe()
        pause = 0.05
        try:
            while True:
                limit = self._batch_size(await self._slots.room())
                woken.clear()  # before a hold as well: waiting for a set event would spin
                hold = self._flow.wait_s(self.sub)
                if hold > 0:
                    if hold >= LONG_HOLD_S:
                        await self._steps.sources.pause(self.sub)
                    await _wait(woken, min(hold, NET_S))
                    continue
                try:
                    found, next_due_s = await self._fetch(limit)
                    pause = 0.05
                    outages.worked(self._activity, self._asks)
                except (StoreError, BrokerError) as error:
                    outages.failed(self._activity, error, broker=self._broker)
                    await asyncio.sleep(pause)
                    pause = min(2.0, pause * 2)
                    continue
                if found < limit and self.waits:
                    wait = NET_S if next_due_s is None else min(NET_S, max(0.001, next_due_s))
                    await _wait(woken, wait)
        finally:
            store.unsubscribe(woken)

    def _batch_size(self, free: int) -> int:
        """Fill the slots in two halves, if there are enough: the event loop runs one half while
        the store writes the other, and no fetcher keeps all slots while it waits for the store."""
        return min(free, max(SMALLEST_HALF, self._slots.size // 2))

    async def _fetch(self, limit: int) -> tuple[int, float | None]:
        """Fetch and start up to `limit` messages. Returns how many were found, and in how many
        seconds the next one is due, if that is known."""
        raise NotImplementedError


class TakeFetcher(_Fetcher):
    """New messages and those that the store holds, where queue and store are one database."""

    async def _fetch(self, limit: int) -> tuple[int, float | None]:
        taken = await self._steps.take(self.sub, limit)
        self._slots.take(self._flow.start(taken.verdicts, self.sub))
        return len(taken.verdicts), taken.next_due_s


class StoreFetcher(_Fetcher):
    """Messages that the store holds: retries, resumed, adopted, the next of a conversation."""

    def __init__(
        self,
        sub: Subscription,
        steps: Steps,
        slots: Slots,
        flow: Flow,
        *,
        company: Company = Company.ANY,
    ) -> None:
        super().__init__(sub, steps, slots, flow)
        self._company = company

    async def _fetch(self, limit: int) -> tuple[int, float | None]:
        store = self._steps.store
        if self._company is not Company.ANY:
            # Wake-ups reach all processes, and most are not about suspects: read before writing.
            waiting = await store.suspects([self.sub.name], worker=self._steps.worker)
            if not (waiting.few if self._company is Company.FEW else waiting.none):
                return 0, None
        reserved = await self._slots.reserve(limit)
        started = 0
        try:
            verdicts = await self._steps.claim_held(self.sub, reserved, self._company)
            started = self._flow.start(verdicts, self.sub)
        finally:
            self._slots.give(reserved - started)
        return len(verdicts), await store.next_due_s(self.sub)


class BrokerFetcher(_Fetcher):
    """New messages of a broker with a life of its own."""

    waits = False

    def __init__(self, sub: Subscription, steps: Steps, slots: Slots, flow: Flow) -> None:
        super().__init__(sub, steps, slots, flow)
        self._reads_as: int | None = None
        """Id of the worker registration that became the only reader of this ordered source."""
        self._claiming: deque[asyncio.Task[None]] = deque()
        """Large batches that are being claimed, the oldest first."""

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            await self._steps.sources.pause(self.sub)
            for claiming in self._claiming:
                claiming.cancel()
            if self._claiming:
                await asyncio.wait(self._claiming)
            for ended in self._claiming:
                if not ended.cancelled():
                    ended.result()  # raises the error of a claim that failed

    async def _fetch(self, limit: int) -> tuple[int, float | None]:
        if self.sub.ordered and not await self._is_the_reader():
            self._asks = STORE
            await asyncio.sleep(NET_S)
            return 0, None
        self._asks = self._broker
        self._remove_ended_claims()  # raises an error without waiting for the next message
        deliveries = await self._steps.receive(self.sub, limit)
        if not deliveries:
            return 0, None
        unclaimed = self._steps.decode(self.sub, deliveries)
        try:
            await self._room_for_a_claim()
            # Reserved only now: the fetcher beside this one takes slots as well.
            reserved = await self._slots.reserve(len(unclaimed))
            claiming, unclaimed = self._claim_and_start(unclaimed, reserved), []
            if self.sub.ordered or len(deliveries) < SMALLEST_HALF:
                await claiming
            else:  # the loop reads the next batch meanwhile, if there are slots for it
                self._claiming.append(asyncio.create_task(claiming, name="ackbone-claim"))
                await asyncio.sleep(0)  # a task cancelled before its first step releases nothing
        finally:
            await self._release([candidate.delivery for candidate in unclaimed])
        return len(deliveries), None

    async def _room_for_a_claim(self) -> None:
        """Wait until fewer than `CLAIMS` batches wait for the store."""
        self._remove_ended_claims()
        if len(self._claiming) >= CLAIMS:
            await asyncio.wait({self._claiming[0]})
            self._remove_ended_claims()

    def _remove_ended_claims(self) -> None:
        """Raises the error of a claim that failed."""
        while self._claiming and self._claiming[0].done():
            self._claiming.popleft().result()

    async def _claim_and_start(self, unclaimed: Sequence[Candidate], reserved: int) -> None:
        """Claim all of these messages and start those that are granted. `reserved`: the number of
        slots that were taken for them."""
        try:
            while True:
                started = 0
                try:
                    verdicts = await self._claim(unclaimed[:reserved])
                    unclaimed = unclaimed[reserved:]
                    started = self._flow.start(verdicts, self.sub)
                finally:
                    self._slots.give(reserved - started)
                await self._settle_others(verdicts)
                if not unclaimed:
                    return
                reserved = await self._slots.reserve(len(unclaimed))
        finally:
            await self._release([candidate.delivery for candidate in unclaimed])

    async def _claim(self, candidates: Sequence[Candidate]) -> Sequence[Verdict]:
        """Return the verdicts of the store, however long it is away."""
        activity, outages = f"claiming from {self.sub.queue}", self._steps.outages
        pause = 0.05
        while True:
            try:
                verdicts = await self._steps.claim(self.sub, candidates)
                outages.worked(activity, STORE)
                return verdicts
            except StoreError as error:
                # The messages are received and not claimed: ask again, and settle nothing.
                outages.failed(activity, error)
                self._flow.unclaimed(self.sub, len(candidates))
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)

    async def _settle_others(self, verdicts: Sequence[Verdict]) -> None:
        """Settle the copies that no run of this worker will settle. The reason is the verdict.

        A server that counts deliveries would end a message by itself if its REJECT got lost. So
        each further copy of a message that ended without success is rejected again.
        """
        granted, left = Answer.RUN, []
        ends: list[Settlement] = []
        for verdict in verdicts:
            delivery, answer = verdict.delivery, verdict.answer
            if delivery is None or (
                answer is granted and (verdict.run is None or verdict.run.delivery is not None)
            ):
                continue
            if answer is Answer.LEAVE:
                left.append(delivery)
            elif verdict.failure and self._steps.sources.verb_of_failure(self.sub) is Verb.REJECT:
                reject = Settlement(delivery=delivery, verb=Verb.REJECT, reason=verdict.failure)
                ends.append(reject)
            else:
                ends.append(Settlement(delivery=delivery, verb=Verb.ACK, reason=answer))
        if ends:
            await self._steps.settle(self.sub, ends)
        await self._release(left)

    async def _release(self, deliveries: Sequence[Delivery]) -> None:
        """Release messages that were received but not claimed: no other worker can see them while
        this process holds them."""
        if deliveries:
            back = [Settlement(delivery=delivery, verb=Verb.RELEASE) for delivery in deliveries]
            await self._steps.settle(self.sub, back)

    async def _is_the_reader(self) -> bool:
        """Only one worker reads an ordered source. Read by two, its messages have no order.

        On a broker with parts every worker reads, each one its parts, and the store looks at the
        owner of each part when it adopts a message.
        """
        steps = self._steps
        broker = steps.sources.broker(self.sub)
        assert broker is not None  # noqa: S101 - for the type checker
        able = broker.capabilities
        in_memory = able.durability is Durability.NONE and able.lease_s is None
        if able.parts or in_memory:  # a broker in memory belongs to this process
            return True
        worker = steps.worker
        if await steps.store.adopt_in_order(self.sub, [], worker=worker) is None:
            if self._reads_as is not None:
                await steps.sources.pause(self.sub)
            self._reads_as = None
            return False
        if self._reads_as != worker.worker_id:
            source: object = await steps.sources.of(self.sub)
            if isinstance(source, TakesOver):
                source.take_over()
            self._reads_as = worker.worker_id
        return True


async def _wait(event: asyncio.Event, seconds: float) -> None:
    if event.is_set():
        return
    try:
        # Not wait_for: before Python 3.12 it loses a cancellation that arrives together with the
        # event, and a drain would never end.
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
