"""The carrier: takes due replies out of the store, hands them to their channels, many at a time,
and writes down what became of each.

A step never waits for a channel: it settles what has ended, takes what there is room for, and
returns. Whatever makes the next step worth while rings: a new reply, an answer, the end of a wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from ackbone.core.breaker import Breaker, BreakerPolicy
from ackbone.core.delivery import (
    MERGE_MOST,
    Again,
    Channel,
    Deliveries,
    Destined,
    Failed,
    Held,
    Limit,
    Limited,
    Limits,
    Merges,
    Outbound,
    Reconciles,
    Result,
    Sent,
    Settled,
    Splits,
    unlimited,
)
from ackbone.core.store import Worker

from .attempts import Policy, Route, attempt
from .waits import compute_backoff_ms

log = logging.getLogger("ackbone.delivery")

SLOTS = 200
RECOVER_S = 1.0
"""How often we look for replies whose sender died."""
LAST_S = 5.0
"""What the last calls get when the process stops. New ones begin in the first half of it: what is
begun should have its answer, or it is in doubt."""
MOST_BREAKERS = 10_000
POLICY = Policy()
_HANDED_BACK = Again(
    error="the process that had taken it stopped", wait_s=0.0, costs=False, tried=False
)


class Carried:
    """A channel and how it is used. What it can do is asked once: that takes its time."""

    def __init__(self, channel: Channel, policy: Policy = POLICY) -> None:
        self.channel = channel
        self.policy = policy
        self.limits: Limits = channel.limits if isinstance(channel, Limited) else unlimited
        self.splits = channel if isinstance(channel, Splits) else None
        asks = isinstance(channel, Reconciles) and getattr(channel, "reconciles", True)
        self.reconciles = channel if asks and isinstance(channel, Reconciles) else None
        merges = channel if isinstance(channel, Merges) and channel.merges else None
        # Who is asked whether a reply arrived knows nothing of one that went under another's id.
        self.merges = merges if self.reconciles is None else None


class _Ended(NamedTuple):
    """A reply whose call has an answer."""

    worker: Worker
    reply: Outbound
    result: Result
    at: float
    """By the loop's clock."""
    counts: bool
    """The call was its own, or it was the first of those that shared it."""
    frees: Limit | None
    """Its destination was down, and answered this call."""


class Carrier:
    """Carries replies of one process. A relay's two steps, `step` and `finish`, and its bell."""

    def __init__(
        self,
        deliveries: Deliveries,
        channels: Sequence[Carried],
        *,
        slots: int = SLOTS,
        tenant_per_minute: int | None = None,
        breaker: BreakerPolicy | None = None,
    ) -> None:
        self._deliveries = deliveries
        self._carried = {each.channel.name: each for each in channels}
        self._tenant_per_minute = tenant_per_minute
        self._limits: dict[str, Limits] = {name: self._limits_of(name) for name in self._carried}
        self._slots = slots
        self._breaker = breaker or BreakerPolicy()
        self._breakers: dict[str, Breaker] = {}
        self._calls: set[asyncio.Task[list[_Ended]]] = set()
        self._takes: set[asyncio.Task[float | None]] = set()
        self._begins_until = float("inf")
        """By the loop's clock; what is taken later is handed back."""
        self._ended: list[_Ended] = []
        self._recovered_at = float("-inf")
        self._bell: asyncio.Event | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def channels(self) -> frozenset[str]:
        return frozenset(self._carried)

    # -- the relay --------------------------------------------------------------------------------

    def subscribe(self) -> asyncio.Event:
        self._bell = self._deliveries.subscribe()
        return self._bell

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._deliveries.unsubscribe(event)

    async def step(self, worker: Worker) -> None:
        """Settle what has ended, take and begin what there is room for."""
        await self._recover(worker)
        # Together, so that they share a commit; both come to their end, whatever one of them meets.
        settling = asyncio.ensure_future(self._settle())
        try:
            next_s = await self._take(worker)
        finally:
            waits_s = await settling
        # The take did not see what was put off in the same moment.
        self._wake_in(min((each for each in (next_s, waits_s) if each is not None), default=None))

    async def finish(self, worker: Worker) -> None:
        """The process stops: send what is due now, begin nothing that would have to wait for long
        or could not end in time, and leave the rest to whoever comes next."""
        begun = asyncio.get_running_loop().time()
        self._begins_until = begun + LAST_S / 2
        try:
            async with asyncio.timeout_at(begun + LAST_S):
                # What has ended and is not settled yet may hold up the next of its conversation.
                while await self._take(worker) == 0 or not self.is_idle:
                    under_way = self._calls | self._takes
                    if under_way:
                        await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                    await self._settle()
        except TimeoutError:
            log.warning("[delivery] stops with %d calls under way", len(self._calls))
        await self._give_up_calls()
        await self._settle()
        for each in self._carried.values():
            await each.channel.close()

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, nothing waits to be written down."""
        return not self._calls and not self._takes and not self._ended

    # -- taking -----------------------------------------------------------------------------------

    async def _take(self, worker: Worker) -> float | None:
        """Returns in how many seconds there is more to do, as far as is known.

        Cancelled, it goes on all the same: what the store gives to us nobody else would send.
        """
        free = self._slots - len(self._calls)
        if free <= 0 or self._takes or asyncio.get_running_loop().time() >= self._begins_until:
            return None  # the next answer rings; one that was cancelled has the slots
        take = asyncio.create_task(self._take_and_begin(worker, free), name="ackbone take")
        self._takes.add(take)
        take.add_done_callback(self._takes.discard)
        return await asyncio.shield(take)

    async def _take_and_begin(self, worker: Worker, free: int) -> float | None:
        taken = await self._deliveries.take(self._limits, limit=free, worker=worker)
        now = asyncio.get_running_loop().time()
        for reply in taken.replies:
            if now >= self._begins_until:
                self._ended.append(_Ended(worker, reply, _HANDED_BACK, now, True, None))
                continue
            call = asyncio.create_task(self._call(reply, worker), name=f"ackbone to {reply.id}")
            self._calls.add(call)
            call.add_done_callback(self._call_ended)
        return taken.next_s

    async def _call(self, reply: Outbound, worker: Worker) -> list[_Ended]:
        if reply.wait_s > 0:
            await asyncio.sleep(reply.wait_s)
        route = self._route(reply)
        replies, merged = await self._merged(reply, worker)
        results, frees = await attempt(replies, merged, route)
        now = asyncio.get_running_loop().time()
        return [
            _Ended(worker, each, result, now, each is reply, frees if each is reply else None)
            for each, result in zip(replies, results, strict=True)
        ]

    async def _merged(self, head: Outbound, worker: Worker) -> tuple[Sequence[Outbound], Outbound]:
        """What goes out by this call, and as what: the head, and what waits behind it by now."""
        merges = self._carried[head.channel].merges
        fitting = {1: head}  # by how many it says

        def fits(replies: Sequence[Outbound]) -> bool:
            merged = None if merges is None else merges.merged(replies)
            if merged is not None:
                fitting[len(replies)] = merged
            return merged is not None

        replies = [head]
        if merges is not None and head.call == 1 and not head.options:
            try:
                replies += await self._deliveries.follow(
                    head, fits, limit=MERGE_MOST - 1, worker=worker
                )
            except Exception as error:  # the head goes, whatever is wrong with the others
                log.warning("[delivery] %s goes alone: %s", head.id[:8], error)
        return replies, fitting[len(replies)]

    def _call_ended(self, call: asyncio.Task[list[_Ended]]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            self._ended += call.result()
        self._ring()

    def _route(self, reply: Outbound) -> Route:
        carried = self._carried[reply.channel]
        *_, destination = self._limits[reply.channel](reply)
        breaker = self._breakers.get(destination.key)
        if breaker is None:
            if len(self._breakers) >= MOST_BREAKERS:  # forget the calm ones
                self._breakers = {key: b for key, b in self._breakers.items() if b.in_a_row}
            monotonic = asyncio.get_running_loop().time
            breaker = self._breakers[destination.key] = Breaker(self._breaker, monotonic)
        # The channel's own: who is told to wait at one place must not stop all of a tenant.
        own = carried.limits(reply)
        return Route(
            channel=carried.channel,
            policy=carried.policy,
            splits=carried.splits,
            reconciles=carried.reconciles,
            breaker=breaker,
            destination=destination,
            narrowest=next((limit for limit in own if not limit.whole_channel), destination),
            widest=next((limit for limit in own if limit.whole_channel), destination),
        )

    def _limits_of(self, name: str) -> Limits:
        """Those of the channel, that of the tenant, and the gate of the destination."""
        channel, own = self._carried[name].channel, self._carried[name].limits
        gate = Limit(f"{name}:at", whole_channel=True)
        where = channel.destination if isinstance(channel, Destined) else None
        per_minute = self._tenant_per_minute

        def limits(reply: Outbound) -> Sequence[Limit]:
            found = list(own(reply))
            if per_minute is not None:
                found.append(Limit(f"tenant:{reply.tenant_id}", per_minute, 60.0))
            found.append(gate if where is None else Limit(f"{name}:at:{where(reply)}"))
            return found

        return limits

    # -- settling ---------------------------------------------------------------------------------

    async def _settle(self) -> float | None:
        """In one write for each worker that we were: what cannot be written now is kept.

        Returns in how many seconds the first of those is due that have to be tried again; 0 if a
        destination is free again, for which others wait.
        """
        ended, self._ended = self._ended, []
        batches: dict[int, tuple[Worker, list[Settled]]] = {}
        now = asyncio.get_running_loop().time()
        for worker, reply, result, at, counts, frees in ended:
            settled = Settled(
                reply=reply, result=result, ago_s=now - at, counts=counts, frees=frees
            )
            batches.setdefault(worker.worker_id, (worker, []))[1].append(settled)
        try:
            for worker, batch in batches.values():
                await self._deliveries.settle(self._limits, batch, worker=worker)
        except BaseException:
            self._ended = ended + self._ended
            raise
        for each in ended:
            tell(each.reply, each.result)
        waits = (each.result.wait_s for each in ended if isinstance(each.result, Again))
        if any(each.frees is not None for each in ended):
            return 0.0
        return min(waits, default=None)

    async def _recover(self, worker: Worker) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._recovered_at < RECOVER_S:
            return
        self._recovered_at = now
        n = await self._deliveries.recover(worker=worker)
        if n:
            log.warning("[delivery] %d replies may have arrived: their sender died in mid-send", n)

    async def _give_up_calls(self) -> None:
        """Whether these arrived is not known: whoever comes next finds them in doubt."""
        calls = set(self._calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    # -- waking -----------------------------------------------------------------------------------

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.set()

    def _wake_in(self, seconds: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if seconds is None or (seconds == 0 and len(self._calls) >= self._slots):
            return
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._ring)


def tell(reply: Outbound, result: Result) -> None:
    """One line for people, in the words that the file queue uses, too."""
    name = reply.id[:8]
    if isinstance(result, Sent):
        count = reply.retry_count
        tries = f", after {count} {'retry' if count == 1 else 'retries'}" if count else ""
        # The common end is worth a line only to who looks closely.
        level = logging.INFO if count else logging.DEBUG
        if result.more:
            log.log(level, "[delivery] part %d: %s (ack%s)", len(reply.receipts) + 1, name, tries)
        else:
            log.log(level, "[delivery] sent: %s (ack%s)", name, tries)
    elif isinstance(result, Again) and not result.tried:
        pass  # one line says that its destination is down, and that is enough
    elif isinstance(result, Again) and not result.costs:
        log.warning("[delivery] waits: %s (%s), %.0fs", name, result.error, result.wait_s)
    elif isinstance(result, Again):
        log.warning(
            "[delivery] FAILED: %s (%s), retry %d, backoff %ds",
            name,
            result.error,
            reply.retry_count + 1,
            compute_backoff_ms(reply.retry_count + 1) // 1000,
        )
    elif isinstance(result, Held):
        log.error("[delivery] UNKNOWN: %s (%s)", name, result.error)
    elif isinstance(result, Failed):
        log.error("[delivery] FAILED: %s (%s)", name, result.error)
