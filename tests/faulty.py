"""A broker that fails on purpose, by script or by dice, and counts what it did.

    faulty = FaultyBroker(inner)
    faulty.script("publish", None, Fault.RAISE_AFTER)     # the second publish: stored, and an error
    faulty = FaultyBroker(inner, chaos(seed=7, publish={Fault.RAISE_BEFORE: 0.1}))

It is a `Broker` and nothing more: optional roles of the inner one are reached through `.inner`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from ackbone.core.broker import (
    Broker,
    Capabilities,
    Delivery,
    Health,
    Outgoing,
    Result,
    Settlement,
    Source,
    Subscription,
)
from ackbone.core.errors import BrokerUnavailable, PublishUnknown
from ackbone.testing import Signal

T = TypeVar("T")


class Fault(StrEnum):
    """What may go wrong with one call."""

    RAISE_BEFORE = "raise_before"
    """Nothing was done, and an error says so."""
    RAISE_AFTER = "raise_after"
    """It was done, and then an error: the caller cannot know."""
    HANG = "hang"
    """Nothing happens until `wake()`; then it is done as if late."""
    DROP = "drop"
    """It was done, and the answer never comes: silence until `wake()`, then an error."""
    DUPLICATE = "duplicate"
    """publish: two copies. receive: the same deliveries come once more in the next call."""
    REORDER = "reorder"
    """receive: the batch comes shuffled."""


METHODS = ("open", "publish", "receive", "settle", "health")
_EVERYWHERE = frozenset({Fault.RAISE_BEFORE, Fault.RAISE_AFTER, Fault.HANG, Fault.DROP})
_POSSIBLE: Mapping[str, frozenset[Fault]] = {
    "open": _EVERYWHERE,
    "publish": _EVERYWHERE | {Fault.DUPLICATE},
    "receive": _EVERYWHERE | {Fault.DUPLICATE, Fault.REORDER},
    "settle": _EVERYWHERE,
    "health": _EVERYWHERE,
}

Plan = Callable[[str], Fault | None]
"""Asked once per call, with the method's name: the fault of this call, or None."""


def chaos(seed: int, **rates: Mapping[Fault, float]) -> Plan:
    """A plan by dice: per method, the share of calls that meet each fault; a seed repeats it."""
    for method, odds in rates.items():
        for fault in odds:
            _check(method, fault)
        if sum(odds.values()) > 1:
            raise ValueError(f"{method}: the shares of its faults add up to more than 1")
    # One sequence per method: how calls of different methods interleave changes nothing.
    dice = {method: random.Random(f"{seed}:{method}") for method in rates}

    def plan(method: str) -> Fault | None:
        if method not in dice:
            return None
        rolled = dice[method].random()
        for fault, share in rates[method].items():
            rolled -= share
            if rolled < 0:
                return fault
        return None

    return plan


class FaultyBroker:
    """Wraps a broker. Without a plan or a script it changes nothing."""

    def __init__(self, inner: Broker, plan: Plan | None = None, *, seed: int = 0) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.faults: Counter[tuple[str, Fault]] = Counter()
        self.stuck: Signal[str] = Signal("a call that hangs")
        """Emits the method's name whenever a call begins to hang."""
        self._plan = plan
        self._scripts: defaultdict[str, deque[Fault | None]] = defaultdict(deque)
        self._random = random.Random(seed)
        self._again: defaultdict[str, deque[Delivery]] = defaultdict(deque)
        self._woken = asyncio.Event()
        self._down = ""

    def script(self, method: str, *faults: Fault | None) -> None:
        """The faults of the next calls of `method`, one per call; None: this one goes well."""
        for fault in faults:
            _check(method, fault)
        self._scripts[method].extend(faults)

    def go_down(self, detail: str = "the broker is down") -> None:
        """From now on every call but `close` raises BrokerUnavailable, until `come_back()`."""
        self._down = detail

    def come_back(self) -> None:
        self._down = ""

    def wake(self) -> None:
        """Let every call that hangs now go on; later ones hang again."""
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def open(self) -> None:
        await self._call("open", self.inner.open, _unavailable)

    async def close(self) -> None:
        """Never fails; deliveries that were to come twice are forgotten."""
        self.calls["close"] += 1
        self._again.clear()
        await self.inner.close()

    async def publish(self, queue: str, batch: Sequence[Outgoing]) -> Sequence[Result]:
        async def once() -> Sequence[Result]:
            return await self.inner.publish(queue, batch)

        async def twice() -> Sequence[Result]:
            results = await once()
            copies = [out for out, result in zip(batch, results, strict=True) if result.ok]
            await self.inner.publish(queue, copies)
            return results

        def unknown(detail: str) -> Exception:
            return PublishUnknown([out.id for out in batch], detail)

        return await self._call("publish", once, unknown, {Fault.DUPLICATE: twice})

    async def subscribe(self, sub: Subscription, *, room: int) -> FaultySource:
        return FaultySource(self, sub, await self.inner.subscribe(sub, room=room))

    async def _receive(
        self, sub: Subscription, inner: Source, *, limit: int, wait: float
    ) -> Sequence[Delivery]:
        again = self._again[sub.queue]

        async def once() -> Sequence[Delivery]:
            if again:
                return [again.popleft() for _ in range(min(limit, len(again)))]
            return await inner.receive(limit=limit, wait=wait)

        async def twice() -> Sequence[Delivery]:
            batch = await once()
            again.extend(batch)
            return batch

        async def shuffled() -> Sequence[Delivery]:
            batch = list(await once())
            self._random.shuffle(batch)
            return batch

        return await self._call(
            "receive", once, _unavailable, {Fault.DUPLICATE: twice, Fault.REORDER: shuffled}
        )

    async def _settle(self, inner: Source, batch: Sequence[Settlement]) -> Sequence[Result]:
        async def once() -> Sequence[Result]:
            return await inner.settle(batch)

        return await self._call("settle", once, _unavailable)

    async def health(self) -> Health:
        if self._down:
            self.calls["health"] += 1
            return Health(ok=False, detail=self._down)
        return await self._call("health", self.inner.health, _unavailable)

    async def _call(
        self,
        method: str,
        do: Callable[[], Awaitable[T]],
        unknown: Callable[[str], Exception],
        variants: Mapping[Fault, Callable[[], Awaitable[T]]] | None = None,
    ) -> T:
        self.calls[method] += 1
        if self._down:
            raise BrokerUnavailable(self._down)
        fault = self._next_fault(method)
        if fault is None:
            return await do()
        self.faults[method, fault] += 1
        text = f"planned fault: {fault} at {method}"
        if fault is Fault.RAISE_BEFORE:
            raise BrokerUnavailable(text)
        if fault is Fault.HANG:
            await self._hang(method)
            return await do()
        if variants and fault in variants:
            return await variants[fault]()
        await do()
        if fault is Fault.DROP:
            await self._hang(method)
        raise unknown(text)

    def _next_fault(self, method: str) -> Fault | None:
        script = self._scripts[method]
        if script:
            return script.popleft()
        fault = self._plan(method) if self._plan is not None else None
        _check(method, fault)
        return fault

    async def _hang(self, method: str) -> None:
        woken = self._woken
        self.stuck.emit(method)
        await woken.wait()


class FaultySource:
    """The inner source, with the faults that are planned for `receive` and `settle`."""

    def __init__(self, broker: FaultyBroker, sub: Subscription, inner: Source) -> None:
        self._broker = broker
        self._sub = sub
        self._inner = inner

    async def receive(self, *, limit: int, wait: float) -> Sequence[Delivery]:
        return await self._broker._receive(self._sub, self._inner, limit=limit, wait=wait)

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Result]:
        return await self._broker._settle(self._inner, batch)

    async def pause(self) -> None:
        await self._inner.pause()


def _unavailable(detail: str) -> Exception:
    return BrokerUnavailable(detail)


def _check(method: str, fault: Fault | None) -> None:
    if method not in _POSSIBLE:
        raise ValueError(f"{method!r} is no method with faults: {', '.join(METHODS)}")
    if fault is not None and fault not in _POSSIBLE[method]:
        raise ValueError(f"{fault} has no meaning for {method}")
