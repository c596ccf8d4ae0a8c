"""What a broker's author provides to the conformance suite, and what its checks work with."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NoReturn
from unittest import SkipTest

from ackbone.core.broker import (
    Broker,
    Delivery,
    Outgoing,
    Result,
    Settlement,
    Subscription,
    Verb,
)
from ackbone.core.errors import BrokerError, StoreUnavailable
from ackbone.core.ids import new_id

from .clock import FakeClock

AWAY = (BrokerError, StoreUnavailable)
"""What a broker raises while its server, or the file that it shares with a store, is away."""
_SHOWN = 5


class BrokerHarness:
    """How the suite gets at a broker. Only `make_broker` must be written."""

    clock: FakeClock | None = None
    """The clock given to the broker, where it takes one: the suite moves it instead of waiting."""
    quiet_s: float = 0.1
    """How long silence must last to count as "nothing comes"."""
    patience_s: float = 10.0
    """How long a message that must come may take before it counts as lost."""
    tolerance_s: float = 1.0
    """How late a delay, a wait or a wake-up may be. Never early."""
    delay_s: float = 1.0
    """The delay, lifetime and so on that is tried; real time unless there is a `clock`."""
    counts_deliveries: bool = True
    """Whether `Delivery.count` grows with each redelivery."""
    bulk: int = 1000
    """Messages of the check with many consumers."""
    restart_messages: int = 600
    restart_publishers: int = 6

    async def make_broker(self) -> Broker:
        """A broker, not open, that talks to the real server (or is the real thing)."""
        raise NotImplementedError("a conformance class must define make_broker()")

    async def second_client(self, first: Broker) -> Broker:
        """Another connection to the same queues as `first`, not open, as a second process has."""
        raise SkipTest("second_client() is not defined: nothing is known about two processes")

    async def restart(self, broker: Broker) -> None:
        """Stop and start the server; for an embedded broker close it and open it again.

        Returns when the server is up; `broker` has to find its way back by itself.
        """
        raise NotImplementedError(
            "a broker with a durability class must define restart(): the suite counts what is left"
        )

    async def prepare_queue(self, broker: Broker, queue: str) -> None:
        """Create `queue`, where the server does not do so by itself."""

    async def dead_letters(self, broker: Broker, queue: str) -> Sequence[bytes] | None:
        """Bodies in the broker's own dead-letter place for `queue`; None: cannot be read."""
        return None

    async def pass_time(self, seconds: float) -> None:
        """Let `seconds` pass for the broker."""
        if self.clock is None:
            await asyncio.sleep(seconds)
        else:
            self.clock.advance(seconds)

    def now_us(self) -> int:
        """Wall time as the broker sees it."""
        return self.clock.now_us() if self.clock is not None else time.time_ns() // 1000


Check = Callable[["Trial"], Awaitable[None]]
"""One check of the suite; raises AssertionError with what it saw."""


async def run_check(harness: BrokerHarness, check: Check) -> None:
    """Run one check on a fresh broker and clean up behind it."""
    trial = Trial(harness)
    try:
        await check(trial)
    finally:
        await trial.close()


class Trial:
    """One run of one check: its brokers, its queues, and the steps that all checks share."""

    def __init__(self, harness: BrokerHarness) -> None:
        self.harness = harness
        self._opened: list[Broker] = []

    async def close(self) -> None:
        for broker in reversed(self._opened):
            with contextlib.suppress(*AWAY):
                await broker.close()

    async def broker(self) -> Broker:
        broker = await self.harness.make_broker()
        await broker.open()
        self._opened.append(broker)
        return broker

    async def second(self, first: Broker) -> Broker:
        other = await self.harness.second_client(first)
        await other.open()
        self._opened.append(other)
        return other

    async def queue(self, broker: Broker, hint: str = "q") -> Subscription:
        """A queue that nobody has used before."""
        name = f"suite-{hint}-{new_id()[-12:]}"
        await self.harness.prepare_queue(broker, name)
        return Subscription(name=name, queue=name)

    async def reopen(self, broker: Broker) -> None:
        await broker.close()
        await broker.open()

    async def publish(
        self, broker: Broker, sub: Subscription, batch: Sequence[Outgoing]
    ) -> Sequence[Result]:
        """Publish in pieces that the broker takes; every item must be accepted."""
        size = broker.capabilities.max_batch
        results: list[Result] = []
        for start in range(0, len(batch), size):
            results += await broker.publish(sub.queue, batch[start : start + size])
        refused = [f"{r.id}: {r.error}" for r in results if not r.ok]
        expect(not refused, f"publish refused what it must take: {refused[:_SHOWN]}")
        expect(len(results) == len(batch), f"{len(batch)} published, {len(results)} results")
        return results

    async def receive(
        self, broker: Broker, sub: Subscription, n: int, *, ack: bool = False
    ) -> list[Delivery]:
        """Receive exactly `n` deliveries, or fail when the queue falls silent before."""
        got: list[Delivery] = []
        while len(got) < n:
            batch = await broker.receive(sub, limit=n - len(got), wait=self.harness.patience_s)
            expect(bool(batch), f"{n} messages were due, {len(got)} came: {n - len(got)} are lost")
            got += batch
            if ack:
                await self.settle(broker, sub, batch, Verb.ACK)
        return got

    async def settle(
        self,
        broker: Broker,
        sub: Subscription,
        batch: Iterable[Delivery],
        verb: Verb,
        delay_s: float = 0.0,
    ) -> Sequence[Result]:
        """Settle; every item must be accepted."""
        asked = [Settlement(delivery=d, verb=verb, reason="suite", delay_s=delay_s) for d in batch]
        results = await broker.settle(sub, asked)
        expect(len(results) == len(asked), f"{len(asked)} settled, {len(results)} results")
        refused = [str(r.error) for r in results if not r.ok]
        expect(not refused, f"{verb} was refused: {refused[:_SHOWN]}")
        return results

    async def expect_silence(self, broker: Broker, sub: Subscription, why: str) -> None:
        """Nothing may come for `quiet_s`."""
        came = await broker.receive(sub, limit=10, wait=self.harness.quiet_s)
        expect(not came, f"{why}, and yet {len(came)} came: {bodies(came)[:_SHOWN]}")


def expect(condition: bool, otherwise: str) -> None:
    """`assert` that python -O leaves in."""
    if not condition:
        fail(otherwise)


def fail(text: str) -> NoReturn:
    raise AssertionError(text)


def expect_same(sent: Iterable[bytes], came: Iterable[bytes], what: str = "messages") -> None:
    """Each one exactly once, in any order."""
    before, after = Counter(sent), Counter(came)
    lost, extra = before - after, after - before
    expect(
        not lost and not extra,
        f"{what}: {lost.total()} of {before.total()} lost {_some(lost)}, "
        f"{extra.total()} too many {_some(extra)}",
    )


def bodies(batch: Iterable[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in batch]


def outgoing(n: int, prefix: str = "m") -> list[Outgoing]:
    """`n` messages with ids of their own and a body that tells them apart."""
    return [Outgoing(id=new_id(), body=f"{prefix}-{i:05d}".encode()) for i in range(n)]


def _some(counted: Counter[bytes]) -> list[bytes]:
    return [body[:40] for body in list(counted)[:_SHOWN]]
