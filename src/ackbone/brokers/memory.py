"""The memory broker: the reference implementation of the broker port.

It keeps the whole contract except durability: its messages are gone with the process. It works in
one event loop only and has no locks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from typing import Protocol, runtime_checkable

import msgspec

from ackbone.core.broker import (
    Capabilities,
    Delivery,
    Durability,
    Health,
    Outgoing,
    QueueStats,
    Result,
    Settlement,
    Subscription,
    Verb,
)
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import BrokerUnavailable, MessageTooLarge
from ackbone.core.ids import new_id

MAX_BODY = 10 * 1024 * 1024


class DeadCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected message, and the reason."""

    queue: str
    identity: str
    body: bytes
    headers: dict[str, str]
    count: int
    reason: str


class MemoryBroker:
    """Queues in this process. `connect()` returns a second client of the same queues."""

    def __init__(self, *, clock: Clock | None = None, max_body: int | None = MAX_BODY) -> None:
        self.capabilities = Capabilities(
            durability=Durability.NONE,
            delay=True,
            priority=True,
            ttl=True,
            ordered=True,
            reject=True,
            max_body=max_body,
        )
        self._space = _Space(clock or SystemClock())
        self._held: dict[str, _Item] = {}
        self._open = False
        self._openings = 0
        self._forget_clock: Callable[[], None] | None = None

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> MemoryBroker:
        """Make a broker with queues of its own. `memory://?like=kafka`: one that pretends."""
        if "?" not in url:
            return cls(clock=clock)
        from .pretending import PretendingBroker

        return PretendingBroker.from_url(url, clock=clock)

    def connect(self) -> MemoryBroker:
        """Return another client of the same queues, with its own deliveries. It is not open yet."""
        other = type(self)(clock=self._space.clock, max_body=self.capabilities.max_body)
        other._space = self._space
        return other

    @property
    def rejected(self) -> Sequence[DeadCopy]:
        """All rejected messages, oldest first."""
        return tuple(self._space.dead)

    async def open(self) -> None:
        if self._open:
            return
        self._open = True
        self._openings += 1
        clock = self._space.clock
        if isinstance(clock, _Movable):
            self._forget_clock = clock.on_advance(self._space.wake_all)

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._forget_clock is not None:
            self._forget_clock()
            self._forget_clock = None
        held, self._held = self._held, {}
        for item in held.values():
            item.queue.put_back(item)
        self._space.wake_all()

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        self._require_open()
        target = self._space.queue(queue)
        results = [self._put(target, out) for out in batch]
        target.wake()
        return results

    async def subscribe(self, sub: Subscription, *, room: int) -> MemorySource:
        self._require_open()
        return MemorySource(self, sub)

    async def _receive(self, sub: Subscription, limit: int, wait: float) -> Sequence[Delivery]:
        self._require_open()
        opening = self._openings
        queue = self._space.queue(sub.queue)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while self._open and opening == self._openings:
            taken = self._take(queue, limit)
            if taken:
                return taken
            left = deadline - loop.time()
            if left <= 0 or limit <= 0:
                await asyncio.sleep(0)
                break
            await queue.changed(min(left, self._space.until_due(queue)))
        return []

    async def _settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        self._require_open()
        for settlement in batch:
            tag = settlement.delivery.tag
            item = self._held.pop(tag, None) if isinstance(tag, str) else None
            if item is not None:
                self._end(item, settlement)
        return [Result(id=s.delivery.identity or "") for s in batch]

    async def health(self) -> Health:
        return Health(ok=True) if self._open else Health(ok=False, detail=_CLOSED)

    async def stats(self, queues: Collection[str] = ()) -> Sequence[QueueStats]:
        self._require_open()
        now = self._space.clock.monotonic()
        return [queue.stats(now) for queue in self._space.queues.values()]

    def _require_open(self) -> None:
        if not self._open:
            raise BrokerUnavailable(_CLOSED)

    def _put(self, queue: _Queue, out: Outgoing) -> Result:
        limit = self.capabilities.max_body
        if limit is not None and len(out.body) > limit:
            return Result(
                id=out.id,
                error=MessageTooLarge(
                    f"the body has {len(out.body)} bytes, the limit of the memory broker is {limit}"
                ),
            )
        clock = self._space.clock
        item = _Item(queue, next(self._space.numbers), out, clock.now_us(), clock.monotonic())
        queue.put(item, item.sent + out.delay_s if out.delay_s > 0 else None)
        return Result(id=out.id)

    def _take(self, queue: _Queue, limit: int) -> list[Delivery]:
        taken = []
        for item in queue.take(limit, self._space.clock.monotonic(), self._may_take):
            tag = f"{self._space.name}:{next(self._space.numbers)}"
            self._held[tag] = item
            taken.append(item.delivery(tag, self._space.name))
        return taken

    def _may_take(self, item: _Item) -> bool:
        """Return True if this client may receive the message now."""
        return True

    def _end(self, item: _Item, settlement: Settlement) -> None:
        queue = item.queue
        if settlement.verb is Verb.RELEASE:
            delayed = settlement.delay_s > 0
            now = self._space.clock.monotonic()
            queue.put_back(item, now + settlement.delay_s if delayed else None)
            queue.wake()
            return
        queue.in_flight -= 1
        if settlement.verb is Verb.REJECT:
            self._space.dead.append(item.dead_copy(self._space.name, settlement.reason))


class MemorySource:
    """One queue, read by one client. It reads no message that nobody receives."""

    def __init__(self, broker: MemoryBroker, sub: Subscription) -> None:
        self._broker = broker
        self._sub = sub

    async def receive(self, *, limit: int, wait: float) -> Sequence[Delivery]:
        return await self._broker._receive(self._sub, limit, wait)

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        return await self._broker._settle(batch)

    async def pause(self) -> None:
        """Do nothing: all messages that were read were received."""


_CLOSED = "the memory broker is not open"


@runtime_checkable
class _Movable(Protocol):
    """A clock that a test moves. It announces each move, because timers of the loop do not
    follow."""

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]: ...


class _Item:
    """One message. Its number never changes, so a released message keeps its place in the order."""

    __slots__ = ("count", "expires_at_us", "number", "out", "queue", "sent", "sent_at_us")

    def __init__(
        self, queue: _Queue, number: int, out: Outgoing, now_us: int, monotonic: float
    ) -> None:
        self.queue = queue
        self.number = number
        # A copy: the caller may change its own dict later.
        self.out = msgspec.structs.replace(out, headers=dict(out.headers))
        self.count = 0
        self.sent = monotonic
        self.sent_at_us = now_us
        self.expires_at_us = None if out.ttl_s is None else now_us + round(out.ttl_s * 1_000_000)

    def delivery(self, tag: str, space: str) -> Delivery:
        self.count += 1
        return Delivery(
            body=self.out.body,
            headers=dict(self.out.headers),
            tag=tag,
            identity=f"{space}:{self.number}",
            count=self.count,
            sent_at_us=self.sent_at_us,
            priority=self.out.priority,
            key=self.out.key,
            expires_at_us=self.expires_at_us,
        )

    def dead_copy(self, space: str, reason: str) -> DeadCopy:
        return DeadCopy(
            queue=self.queue.name,
            identity=f"{space}:{self.number}",
            body=self.out.body,
            headers=dict(self.out.headers),
            count=self.count,
            reason=reason,
        )


class _Queue:
    """Ready messages by priority and number, delayed ones by due time, and waiting receivers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ready: list[tuple[int, int, _Item]] = []
        self._delayed: list[tuple[float, int, _Item]] = []
        self._waiters: set[asyncio.Future[None]] = set()
        self.in_flight = 0

    def put(self, item: _Item, due: float | None = None) -> None:
        if due is None:
            heappush(self._ready, (-item.out.priority, item.number, item))
        else:
            heappush(self._delayed, (due, item.number, item))

    def put_back(self, item: _Item, due: float | None = None) -> None:
        self.in_flight -= 1
        self.put(item, due)

    def take(
        self, limit: int, now: float, may_take: Callable[[_Item], bool] = lambda item: True
    ) -> list[_Item]:
        while self._delayed and self._delayed[0][0] <= now:
            self.put(heappop(self._delayed)[2])
        taken: list[_Item] = []
        left: list[_Item] = []
        while self._ready and len(taken) < limit:
            item = heappop(self._ready)[2]
            (taken if may_take(item) else left).append(item)
        for item in left:
            self.put(item)
        self.in_flight += len(taken)
        return taken

    def next_due(self) -> float | None:
        return self._delayed[0][0] if self._delayed else None

    def stats(self, now: float) -> QueueStats:
        due = sum(1 for entry in self._delayed if entry[0] <= now)
        oldest = min((entry[2].sent for entry in self._ready), default=None)
        return QueueStats(
            queue=self.name,
            ready=len(self._ready) + due,
            delayed=len(self._delayed) - due,
            in_flight=self.in_flight,
            oldest_age_s=None if oldest is None else max(0.0, now - oldest),
        )

    async def changed(self, timeout: float) -> None:
        """Wait for the next `wake`, or for `timeout` seconds of the event loop."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(timeout, _finish, waiter)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def wake(self) -> None:
        # Wake all: a receiver that finds nothing waits again, and a cancelled one loses no wake-up.
        for waiter in self._waiters:
            _finish(waiter)


class _Space:
    """The state that the clients of one memory broker share."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # Unique to this process: a store that outlives it must not take a new message for one that
        # it already knows.
        self.name = f"memory:{new_id()}"
        self.numbers = itertools.count(1)
        self.queues: dict[str, _Queue] = {}
        self.dead: list[DeadCopy] = []

    def queue(self, name: str) -> _Queue:
        found = self.queues.get(name)
        if found is None:
            found = self.queues[name] = _Queue(name)
        return found

    def until_due(self, queue: _Queue) -> float:
        """Return the seconds until a delayed message is due. A moved clock wakes receivers
        itself."""
        due = queue.next_due()
        if due is None or isinstance(self.clock, _Movable):
            return float("inf")
        return max(0.0, due - self.clock.monotonic())

    def wake_all(self) -> None:
        for queue in self.queues.values():
            queue.wake()


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
