"""The settler: commits go on while the broker hears of the last one; nothing is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest

from ackbone.core.broker import (
    Capabilities,
    Delivery,
    Durability,
    Settlement,
    Subscription,
    Verb,
)
from ackbone.core.clock import SystemClock
from ackbone.core.message import Message
from ackbone.core.outcome import Dead, Done
from ackbone.core.store import Commit, Finished, Run, Token, Worker
from ackbone.core.task_protocol import AckWithNotices
from ackbone.engine.outages import Outages
from ackbone.engine.settler import Settler
from ackbone.engine.steps import Steps
from ackbone.engine.wiring import Ports

SUB = Subscription(name="q", queue="q")
LIMIT_S = 30.0


class Store:
    """Commits at once, and says so."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.committed = asyncio.Event()
        self.answer = Commit.COMMITTED
        self.error: Exception | None = None

    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> list[Commit]:
        if self.error is not None:
            raise self.error
        self.batches.append(len(batch))
        self.committed.set()
        return [self.answer] * len(batch)


class Broker:
    """Takes its time: each settlement waits for `go_on`."""

    capabilities = Capabilities(durability=Durability.FSYNC, reject=True)

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.settled: list[Settlement] = []
        self.error: Exception | None = None
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.at_once = 0

    async def subscribe(self, sub: Subscription, *, room: int) -> Broker:
        return self

    async def settle(self, batch: Sequence[Settlement]) -> list[Any]:
        self.at_once += 1
        assert self.at_once == 1, "batches come one after the other"
        self.asked.set()
        await self.go_on.wait()
        if self.error is not None:
            self.at_once -= 1
            raise self.error
        self.settled += batch
        self.told.append([str(item.delivery.identity) for item in batch])
        self.at_once -= 1
        return []


class Flow:
    """Is told how runs end, and does nothing."""

    def committed(self, items: Sequence[Finished], commits: Sequence[Commit]) -> None: ...

    def fenced(self, finished: Finished, sub: Subscription) -> None: ...

    def failed(self, error: Exception) -> None: ...


def settler_on(
    store: Any, broker: Any, flow: Flow, told: Mapping[str, str] | None = None, **others: Any
) -> Settler:
    """`told`: `Ports.results_on_ack`. `others`: the brokers of queues with these names."""

    def broker_of(queue: str) -> Any:
        return others.get(queue, broker)

    ports = Ports(store=store, broker_of=broker_of, clock=SystemClock(), results_on_ack=told or {})
    steps = Steps(ports, Outages())
    steps.worker = Worker(worker_id=1, name="w")
    return Settler(steps, cast(Any, flow))


def ended(name: str, *, held: bool = True) -> Finished:
    delivery = Delivery(body=b"", headers={}, tag=name, identity=name) if held else None
    run = Run(
        subscription="q",
        queue="q",
        message=Message(type="t", id=name),
        token=Token(1, 1),
        attempt=1,
        crashes=0,
        claimed_at_us=1,
        created_at_us=1,
        delivery=delivery,
    )
    return Finished(run=run, outcome=Done(None), started_at_us=1, finished_at_us=2)


@pytest.fixture
def failures() -> list[Exception]:
    """What the worker is told of."""
    return []


@pytest.fixture
def world(failures: list[Exception]) -> tuple[Settler, Store, Broker, list[str]]:
    store, broker = Store(), Broker()
    reported: list[str] = []

    class Reports(Flow):
        def committed(self, items: Sequence[Finished], commits: Sequence[Commit]) -> None:
            reported.extend(item.run.message.id for item in items)

        def failed(self, error: Exception) -> None:
            failures.append(error)

    return settler_on(store, broker, Reports()), store, broker, reported


async def test_the_next_batch_is_committed_while_the_broker_hears_of_the_last(world: Any):
    settler, store, broker, reported = world
    async with asyncio.timeout(LIMIT_S):
        settler.add(ended("a"), SUB)
        await broker.asked.wait()
        store.committed.clear()
        settler.add(ended("b"), SUB)
        await store.committed.wait()
        assert store.batches == [1, 1]
        assert broker.told == []
        assert settler.waiting == 2  # neither is over: a worker that stops waits for both
        assert [run.message.id for run, _ in settler.unsettled] == ["a", "b"]
        assert reported == []
        broker.go_on.set()
        await settler.drain()
    assert broker.told == [["a"], ["b"]]
    assert reported == ["a", "b"]
    assert settler.waiting == 0


async def test_a_broker_that_hangs_does_not_hold_up_another_one() -> None:
    store, slow, quick = Store(), Broker(), Broker()
    quick.go_on.set()
    settler = settler_on(store, slow, Flow(), other=quick)
    elsewhere = Subscription(name="other", queue="other")
    async with asyncio.timeout(LIMIT_S):
        settler.add(ended("a"), SUB)
        await slow.asked.wait()
        for name in ("b", "c"):
            quick.asked.clear()
            settler.add(ended(name), elsewhere)
            settler.add(ended(name.upper()), SUB)
            await quick.asked.wait()
        slow.go_on.set()
        await settler.drain()
    assert quick.told == [["b"], ["c"]]
    assert slow.told == [["a"], ["B", "C"]], "what was committed meanwhile is one batch"


async def test_who_gives_up_gives_up_on_what_the_broker_does_not_take_too(world: Any):
    settler, _, broker, reported = world
    async with asyncio.timeout(LIMIT_S):
        settler.add(ended("a"), SUB)
        await broker.asked.wait()
        assert settler.stop() == 0  # it is committed: it will not run again
        await settler.drain()
    assert (broker.told, reported, settler.waiting) == ([], [], 0)


async def test_with_nobody_to_tell_a_commit_is_the_end(world: Any):
    settler, store, broker, reported = world
    async with asyncio.timeout(LIMIT_S):
        settler.add(ended("a", held=False), SUB)
        await settler.drain()
    assert (store.batches, broker.told, reported) == ([1], [], ["a"])


@pytest.mark.parametrize(
    ("policy", "verb", "reason"),
    [("dlq", Verb.ACK, ""), ("nack", Verb.REJECT, "unstorable"), ("requeue", Verb.RELEASE, "")],
)
async def test_what_the_store_buried_is_told_and_counted_as_dead(
    policy: str, verb: Verb, reason: str
):
    """Its run succeeded, and the store could not hold that: nobody may hear of a success."""
    store, broker = Store(), Broker()
    store.answer = Commit.BURIED
    broker.go_on.set()
    reported: list[tuple[Finished, Commit]] = []

    class Reports(Flow):
        def committed(self, items: Sequence[Finished], commits: Sequence[Commit]) -> None:
            reported.extend(zip(items, commits, strict=True))

    settler = settler_on(store, broker, Reports(), {"q": "results"})
    sub = Subscription(name="q", queue="q", ack_policy=policy)
    succeeded = msgspec.structs.replace(ended("a"), told_on_ack=True, result=b"1")
    async with asyncio.timeout(LIMIT_S):
        settler.add(succeeded, sub)
        await settler.drain()
    (settlement,) = broker.settled
    assert not isinstance(settlement, AckWithNotices)
    assert (settlement.verb, settlement.reason) == (verb, reason)
    ((counted, commit),) = reported
    assert (commit, counted.outcome, counted.result) == (Commit.BURIED, Dead("unstorable"), None)
    store.answer = Commit.COMMITTED  # and what it keeps as a success is told
    async with asyncio.timeout(LIMIT_S):
        settler.add(succeeded, sub)
        await settler.drain()
    told = broker.settled[-1]
    assert isinstance(told, AckWithNotices)
    assert [queue for queue, _ in told.notices] == ["results"]


async def test_a_failure_is_told_and_what_waits_is_kept(world: Any, failures: list[Exception]):
    """Half a worker is worse than none: whoever runs it stops it, and tries once more."""
    settler, store, broker, reported = world
    broker.go_on.set()
    store.error = KeyError("a mistake")
    async with asyncio.timeout(LIMIT_S):
        settler.add(ended("a"), SUB)
        settler.add(ended("b"), SUB)
        await settler.drain()
        assert (failures, reported) == ([store.error], [])
        assert [run.message.id for run, _ in settler.unsettled] == ["a", "b"]
        await settler.drain()  # in vain
        assert (len(failures), settler.waiting) == (2, 2)
        store.error = None
        await settler.drain()
    assert (reported, settler.waiting) == (["a", "b"], 0)
    assert broker.told == [["a", "b"]]


async def test_a_failure_while_the_broker_is_told_is_no_secret_either(
    world: Any, failures: list[Exception]
):
    settler, store, broker, _ = world
    broker.go_on.set()
    broker.error = KeyError("a mistake")
    async with asyncio.timeout(LIMIT_S):
        settler.add(ended("a"), SUB)
        await settler.drain()
        assert (failures, store.batches) == ([broker.error], [1])
        assert settler.waiting == 0  # committed: its copy comes again, and is known
        broker.error = None
        settler.add(ended("b"), SUB)
        await settler.drain()
    assert broker.told == [["b"]]
