"""The part of the conformance suite that a broker's author fills in, and tools of the checks."""

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
    Source,
    Subscription,
    Verb,
)
from ackbone.core.errors import BrokerError, StoreUnavailable
from ackbone.core.ids import new_id

from .clock import FakeClock

AWAY = (BrokerError, StoreUnavailable)
"""Errors of a broker while its server, or the file that it shares with a store, is unavailable."""
_SHOWN = 5
ROOM = 2000
"""How many messages the checks have at a time, at most."""


class BrokerHarness:
    """How the suite creates and controls a broker. Only `make_broker` is required."""

    clock: FakeClock | None = None
    """The clock that the broker uses, if it takes one. The suite moves it instead of waiting."""
    quiet_s: float = 0.1
    """Seconds without a message after which none is expected any more."""
    patience_s: float = 10.0
    """Seconds after which an expected message counts as lost."""
    tolerance_s: float = 1.0
    """Seconds that a delay, a wait or a wake-up may be late. It must never be early."""
    delay_s: float = 1.0
    """Seconds of the delays and lifetimes in the checks. Real time, unless there is a `clock`."""
    counts_deliveries: bool = True
    """Whether `Delivery.count` grows with each redelivery."""
    bulk: int = 1000
    """Number of messages in the check with many consumers."""
    restart_messages: int = 600
    restart_publishers: int = 6

    async def make_broker(self) -> Broker:
        """Return a broker, not open, that uses the real server."""
        raise NotImplementedError("a conformance class must define make_broker()")

    async def second_client(self, first: Broker) -> Broker:
        """Return another client of the same queues, not open, as a second process would have."""
        raise SkipTest("second_client() is not defined: two processes were not tested")

    async def restart(self, broker: Broker) -> None:
        """Stop and start the server. Close and open an embedded broker.

        Return when the server is up. `broker` must reconnect by itself.
        """
        raise NotImplementedError(
            "a durable broker must define restart(): the suite counts the messages that are left"
        )

    async def prepare_queue(self, broker: Broker, queue: str) -> None:
        """Create `queue`, if the server does not do so by itself."""

    async def dead_letters(self, broker: Broker, queue: str) -> Sequence[bytes] | None:
        """Return the bodies in the broker's dead-letter queue for `queue`. None: cannot be read."""
        return None

    async def pass_time(self, seconds: float) -> None:
        """Let `seconds` pass for the broker."""
        if self.clock is None:
            await asyncio.sleep(seconds)
        else:
            self.clock.advance(seconds)

    def now_us(self) -> int:
        """Return the wall clock that the broker uses."""
        return self.clock.now_us() if self.clock is not None else time.time_ns() // 1000


Check = Callable[["Trial"], Awaitable[None]]
"""One check of the suite. It raises AssertionError."""


async def run_check(harness: BrokerHarness, check: Check) -> None:
    """Run one check on a new broker and clean up after it."""
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
        """Return a new queue."""
        name = f"suite-{hint}-{new_id()[-12:]}"
        await self.harness.prepare_queue(broker, name)
        return Subscription(name=name, queue=name)

    async def reopen(self, broker: Broker) -> None:
        await broker.close()
        await broker.open()

    async def publish(
        self, broker: Broker, sub: Subscription, batch: Sequence[Outgoing]
    ) -> Sequence[Result]:
        """Publish. Every message must be accepted."""
        results = await broker.publish(sub.queue, batch)
        refused = [f"{r.id}: {r.error}" for r in results if not r.ok]
        expect(not refused, f"publish refused what it must take: {refused[:_SHOWN]}")
        expect(len(results) == len(batch), f"{len(batch)} published, {len(results)} results")
        return results

    async def source(self, broker: Broker, sub: Subscription) -> Source:
        return await broker.subscribe(sub, room=ROOM)

    async def look(
        self, broker: Broker, sub: Subscription, limit: int, *, wait: float | None = None
    ) -> Sequence[Delivery]:
        """Receive once, up to `limit` deliveries. Wait `quiet_s` unless told otherwise."""
        source = await self.source(broker, sub)
        return await source.receive(
            limit=limit, wait=self.harness.quiet_s if wait is None else wait
        )

    async def receive(
        self, broker: Broker, sub: Subscription, n: int, *, ack: bool = False
    ) -> list[Delivery]:
        """Receive exactly `n` deliveries. Fail if no more come before that."""
        got: list[Delivery] = []
        while len(got) < n:
            batch = await self.look(broker, sub, n - len(got), wait=self.harness.patience_s)
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
        """Settle. Every item must be accepted."""
        asked = [Settlement(delivery=d, verb=verb, reason="suite", delay_s=delay_s) for d in batch]
        source = await self.source(broker, sub)
        results = await source.settle(asked)
        expect(len(results) == len(asked), f"{len(asked)} settled, {len(results)} results")
        refused = [str(r.error) for r in results if not r.ok]
        expect(not refused, f"{verb} was refused: {refused[:_SHOWN]}")
        return results

    async def expect_silence(self, broker: Broker, sub: Subscription, why: str) -> None:
        """Fail if a message comes within `quiet_s`."""
        came = await self.look(broker, sub, 10)
        expect(not came, f"{why}, and yet {len(came)} came: {bodies(came)[:_SHOWN]}")


def expect(condition: bool, otherwise: str) -> None:
    """As `assert`, but also with `python -O`."""
    if not condition:
        fail(otherwise)


def fail(text: str) -> NoReturn:
    raise AssertionError(text)


def expect_same(sent: Iterable[bytes], came: Iterable[bytes], what: str = "messages") -> None:
    """Check that each body came exactly once, in any order."""
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
    """Return `n` messages with different ids and bodies."""
    return [Outgoing(id=new_id(), body=f"{prefix}-{i:05d}".encode()) for i in range(n)]


def _some(counted: Counter[bytes]) -> list[bytes]:
    return [body[:40] for body in list(counted)[:_SHOWN]]
