"""The carrier: takes due replies from the store, gives them to their channels, many at a time, and
records the result of each.

A step never waits for a channel: it settles the calls that have ended, takes as many replies as
there is room for, and returns. A new reply, an answer or the end of a wait wakes it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ackbone.core.breaker import Breaker, BreakerPolicy
from ackbone.core.outbound.delivery import (
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
from .backoff import compute_backoff_ms

log = logging.getLogger("ackbone.delivery")

SLOTS = 200
RECOVER_S = 1.0
"""How often to look for replies whose sender died, in seconds."""
LAST_S = 5.0
"""Time for the last calls when the process stops, in seconds. New calls begin only in the first
half of it: a call without an answer leaves its reply in doubt."""
MOST_BREAKERS = 10_000
POLICY = Policy()
_HANDED_BACK = Again(
    error="the process that had taken it stopped", wait_s=0.0, costs=False, tried=False
)


class Carried:
    """A channel and its policy. Its abilities are checked once, because the check is slow."""

    def __init__(self, channel: Channel, policy: Policy = POLICY) -> None:
        self.channel = channel
        self.policy = policy
        self.limits: Limits = channel.limits if isinstance(channel, Limited) else unlimited
        self.splits = channel if isinstance(channel, Splits) else None
        asks = isinstance(channel, Reconciles) and getattr(channel, "reconciles", True)
        self.reconciles = channel if asks and isinstance(channel, Reconciles) else None
        merges = channel if isinstance(channel, Merges) and channel.merges else None
        # Channels that reconcile by id cannot confirm a reply that was merged into another one.
        self.merges = merges if self.reconciles is None else None


class _Ended(NamedTuple):
    """A reply whose call has ended."""

    worker: Worker
    settled: Settled
    at: float
    """When the answer came, by the loop's clock."""


class Carrier:
    """Sends the replies of one process. A relay runs its `step`, and `finish` at the end."""

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
        """Replies that are taken after this time, by the loop's clock, are handed back."""
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
        """Settle the calls that have ended; take and begin as many replies as there is room for."""
        await self._recover(worker)
        # At the same time, so that they share a commit. Both finish, even if one of them fails.
        settling = asyncio.ensure_future(self._settle())
        try:
            next_s = await self._take(worker)
        finally:
            waits_s = await settling
        # The take did not see replies that were put off at the same moment.
        self._wake_in(min((each for each in (next_s, waits_s) if each is not None), default=None))

    async def finish(self, worker: Worker) -> None:
        """Send what is due now, because the process stops. Replies that would have to wait, or
        whose call could not end in time, are left to the next process."""
        begun = asyncio.get_running_loop().time()
        self._begins_until = begun + LAST_S / 2
        try:
            async with asyncio.timeout_at(begun + LAST_S):
                # The next reply of a conversation waits until the one before it is settled.
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
        """True if no call is in progress and every result is recorded."""
        return not self._calls and not self._takes and not self._ended

    # -- taking -----------------------------------------------------------------------------------

    async def _take(self, worker: Worker) -> float | None:
        """Return the seconds until there is more to do, if known.

        If this is cancelled, the take continues: no other process would send what it takes.
        """
        free = self._slots - len(self._calls)
        if free <= 0 or self._takes or asyncio.get_running_loop().time() >= self._begins_until:
            return None  # the next answer wakes us; a take that was cancelled has the slots
        take = asyncio.create_task(self._take_and_begin(worker, free), name="ackbone take")
        self._takes.add(take)
        take.add_done_callback(self._takes.discard)
        return await asyncio.shield(take)

    async def _take_and_begin(self, worker: Worker, free: int) -> float | None:
        taken = await self._deliveries.take(self._limits, limit=free, worker=worker)
        now = asyncio.get_running_loop().time()
        for reply in taken.replies:
            if now >= self._begins_until:
                settled = Settled(reply=reply, result=_HANDED_BACK)
                self._ended.append(_Ended(worker, settled, now))
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
        head, *followers = [
            Settled(reply=each, result=result, counts=each is reply)
            for each, result in zip(replies, results, strict=True)
        ]
        head = msgspec.structs.replace(head, frees=frees)
        return [_Ended(worker, each, now) for each in (head, *followers)]

    async def _merged(self, head: Outbound, worker: Worker) -> tuple[Sequence[Outbound], Outbound]:
        """Return the replies that this call sends, the head and those behind it that fit, and the
        one reply that says all of it."""
        merges = self._carried[head.channel].merges
        fitting = {1: head}  # by the number of replies

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
            except Exception as error:  # the head is sent anyway
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
            if len(self._breakers) >= MOST_BREAKERS:  # forget those without failures
                self._breakers = {key: b for key, b in self._breakers.items() if b.in_a_row}
            monotonic = asyncio.get_running_loop().time
            breaker = self._breakers[destination.key] = Breaker(self._breaker, monotonic)
        # Only the channel's own limits: a wait at one place must not block all of a tenant.
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
        """Return the limits of the channel, of the tenant, and of the destination (last)."""
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
        """Record the results, in one transaction for each worker id that this process had. Results
        that cannot be written now are kept.

        Returns the seconds until the first of these replies is due again; 0 if a destination is
        back that others wait for.
        """
        ended, self._ended = self._ended, []
        batches: dict[int, tuple[Worker, list[Settled]]] = {}
        now = asyncio.get_running_loop().time()
        for worker, settled, at in ended:
            aged = msgspec.structs.replace(settled, ago_s=now - at)
            batches.setdefault(worker.worker_id, (worker, []))[1].append(aged)
        try:
            for worker, batch in batches.values():
                await self._deliveries.settle(self._limits, batch, worker=worker)
        except BaseException:
            self._ended = ended + self._ended
            raise
        for each in ended:
            log_result(each.settled.reply, each.settled.result)
        if any(each.settled.frees is not None for each in ended):
            return 0.0
        results = [each.settled.result for each in ended]
        return min((each.wait_s for each in results if isinstance(each, Again)), default=None)

    async def _recover(self, worker: Worker) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._recovered_at < RECOVER_S:
            return
        self._recovered_at = now
        n = await self._deliveries.recover(worker=worker)
        if n:
            log.warning("[delivery] %d replies may have arrived: their sender died in mid-send", n)

    async def _give_up_calls(self) -> None:
        """Cancel the calls in progress. The next process finds their replies in doubt."""
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


def log_result(reply: Outbound, result: Result) -> None:
    """Log one line about a result, in the same words as `DeliveryRunner`."""
    name = reply.id[:8]
    if isinstance(result, Sent):
        count = reply.retry_count
        tries = f", after {count} {'retry' if count == 1 else 'retries'}" if count else ""
        # A success at the first attempt is the common case, and is logged for debugging only.
        level = logging.INFO if count else logging.DEBUG
        if result.more:
            log.log(level, "[delivery] part %d: %s (ack%s)", len(reply.receipts) + 1, name, tries)
        else:
            log.log(level, "[delivery] sent: %s (ack%s)", name, tries)
    elif isinstance(result, Again) and not result.tried:
        pass  # `attempt` has logged that its destination is down
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
