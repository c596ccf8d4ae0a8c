"""What the author of a queue of replies provides to its suite, and what its checks work with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from ackbone.core.events import Entry, Event
from ackbone.core.outbound.delivery import (
    Again,
    Deliveries,
    Limits,
    New,
    Outbound,
    Result,
    Sent,
    Settled,
    Taken,
    unlimited,
)
from ackbone.core.store import Worker
from ackbone.testing.harness import expect
from tests.suites.store_harness import CRASH_BUDGET, LEASE_S, Store, StoreHarness, StoreTrial, heard

CHANNEL = "c"


class DeliveryHarness(StoreHarness):
    """How the suite gets at a queue: by `make_store`, `let_die` and `make_deliveries`."""

    def make_deliveries(self, store: Store) -> Deliveries:
        """The queue of an open store."""
        raise NotImplementedError("a suite of deliveries must define make_deliveries()")


DeliveryCheck = Callable[["DeliveryTrial"], Awaitable[None]]
"""One check of the suite; raises AssertionError with what it saw."""


async def run_delivery_check(harness: DeliveryHarness, check: DeliveryCheck) -> None:
    """Run one check on a fresh queue and clean up behind it."""
    async with AsyncExitStack() as stack:
        store = await harness.make_store()
        await store.open()
        stack.push_async_callback(store.close)
        await check(DeliveryTrial(harness, store, stack))


class DeliveryTrial:
    """One run of one check: the queue, and the steps that all checks share."""

    def __init__(self, harness: DeliveryHarness, store: Store, stack: AsyncExitStack) -> None:
        self.harness = harness
        self.store = store
        self.clock = harness.clock
        self.queue = harness.make_deliveries(store)
        self.limits: dict[str, Limits] = {CHANNEL: unlimited}
        self.events: list[Event] = []
        self._stack = stack
        store.on_events(self._written)

    def _written(self, entries: Sequence[Entry]) -> None:
        self.events += heard(entries)

    async def another(self) -> DeliveryTrial:
        """Another process's, as far as it can tell."""
        store = await self.harness.make_store()
        await store.open()
        self._stack.push_async_callback(store.close)
        return DeliveryTrial(self.harness, store, self._stack)

    def runs(self) -> StoreTrial:
        """The steps of runs that write replies."""
        return StoreTrial(self.harness, self.store)

    async def worker(self) -> Worker:
        return await self.store.register("suite")

    async def die(self, worker: Worker) -> None:
        await self.harness.let_die(self.store, worker)

    async def reap(self, worker: Worker) -> None:
        await self.store.reap(worker=worker, lease_s=LEASE_S, crash_budget=CRASH_BUDGET)

    async def put(self, *ids: str, **fields: Any) -> None:
        """Replies to `ann`, unless `fields` say otherwise."""
        fields = {"tenant_id": "acme", "channel": CHANNEL, "recipient": "ann", **fields}
        await self.queue.put([New(id=each, content=f"text of {each}", **fields) for each in ids])

    async def take(self, worker: Worker, limit: int = 100) -> Taken:
        taken = await self.queue.take(self.limits, limit=limit, worker=worker)
        expect(len(taken.replies) <= limit, f"{len(taken.replies)} taken, {limit} asked for")
        return taken

    async def one(self, worker: Worker) -> Outbound:
        """The one reply that may go."""
        taken = await self.take(worker)
        expect(len(taken.replies) == 1, f"one may go, {names(taken)} came")
        return taken.replies[0]

    async def none(self, worker: Worker) -> float | None:
        """Nothing may go; returns when to look again."""
        taken = await self.take(worker)
        expect(not taken.replies, f"nothing may go, {names(taken)} came")
        return taken.next_s

    async def settle(
        self,
        worker: Worker,
        *replies: Outbound,
        result: Result = Sent(),  # noqa: B008 - it is frozen
        ago_s: float = 0.0,
    ) -> None:
        batch = [Settled(reply=reply, result=result, ago_s=ago_s) for reply in replies]
        await self.queue.settle(self.limits, batch, worker=worker)

    async def again(self, worker: Worker, reply: Outbound, wait_s: float, **said: Any) -> None:
        result = Again(error="no luck", wait_s=wait_s, **said)
        await self.settle(worker, reply, result=result)

    def told(self, kind: str) -> list[Mapping[str, Any]]:
        """What was told of replies, by events of one kind."""
        return [event.data for event in self.events if event.type == kind]

    def told_ids(self, kind: str) -> list[str]:
        return [str(data["delivery_id"]) for data in self.told(kind)]


def names(found: Taken | Sequence[Outbound]) -> list[str]:
    replies = found.replies if isinstance(found, Taken) else found
    return [reply.id for reply in replies]
