"""Ordered queues on brokers with parts: every worker reads, and the order outlives moves."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Context
from ackbone.brokers.pretending import Like
from ackbone.core.broker import Subscription, Verb
from ackbone.core.store import Answer, Candidate, Verdict
from ackbone.testing import PretendingBroker
from tests.integration.lab import MEMORY, Lab

KEYS = 12
KINDS: tuple[Like, ...] = ("kafka", "sqs", "servicebus")


@pytest.fixture
async def lab(home: Path, schema: Path) -> AsyncIterator[Lab]:
    lab = Lab(home, MEMORY, schema)
    yield lab
    await lab.close()


class Fleet:
    """Three apps with a store in common, each with its own client of the broker."""

    def __init__(self, lab: Lab, broker: PretendingBroker) -> None:
        self.lab = lab
        self.clients = [broker, broker.connect(), broker.connect()]
        self.apps: list[App] = []
        self.ran: list[tuple[str, int]] = []

    async def open(self) -> None:
        for client in self.clients:
            app = await self.lab.open()
            await app.broker.close()
            app.brokers.by_name["default"] = client
            await client.open()
            app.on("step")(self._step)
            self.apps.append(app)

    async def _step(self, ctx: Context) -> None:
        key, n = ctx.payload
        self.ran.append((key, n))

    async def send(self, n: int, *, start: int = 0) -> None:
        """Send `n` messages of each conversation."""
        for at in range(start, start + n):
            for key in range(KEYS):
                await self.apps[0].send("step", [f"k{key}", at], ordering_key=f"k{key}")

    async def ends(self, n: int) -> None:
        """Wait until everything has run; check the order, and that nothing ran twice."""
        total = n * KEYS

        def statuses() -> Counter[str]:
            return Counter(self.lab.statuses().values())

        await self.lab.until(lambda: statuses()["succeeded"] == total, statuses)
        for key in range(KEYS):
            ran = [at for name, at in self.ran if name == f"k{key}"]
            assert ran == list(range(n)), f"k{key} ran as {ran}"
        assert statuses() == {"succeeded": total}
        await self.lab.until(lambda: self.clients[0].in_flight == 0, "all copies are settled")


class StopsBeforeAdopting:
    """A worker that stands still with the messages that it received, before it asks the store.

    `opening`: at its first batch, with which it takes parts over. Else at its first batch that
    opens no part, which must be refused if the parts moved.
    """

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch, *, opening: bool) -> None:
        self._opening = opening
        self.stopped, self.go_on = asyncio.Event(), asyncio.Event()
        self.parts: set[str] = set()
        self.bodies: set[bytes] = set()
        self.verdicts: list[Verdict] | None = None
        self._adopt: Any = app.store.adopt_in_order
        monkeypatch.setattr(app.store, "adopt_in_order", self._hold)

    async def _hold(
        self, sub: Subscription, batch: Sequence[Candidate], **options: Any
    ) -> Sequence[Verdict] | None:
        copies = [candidate.delivery for candidate in batch]
        if self.stopped.is_set() or any(c.opens_part for c in copies) is not self._opening:
            found: Sequence[Verdict] | None = await self._adopt(sub, batch, **options)
            return found
        self.parts = {str(copy.part) for copy in copies}
        self.bodies = {copy.body for copy in copies}
        self.stopped.set()
        await self.go_on.wait()
        self.verdicts = await self._adopt(sub, batch, **options)
        return self.verdicts


@pytest.mark.parametrize("opening", [False, True])
async def test_parts_move_from_a_worker_that_stands_still(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, opening: bool
) -> None:
    """It wakes up with messages of parts that others have read further since then.

    If it had not opened them yet, it takes them over, which passes over nothing. Their readers are
    refused once then, and read them again.
    """
    fleet = Fleet(lab, PretendingBroker("kafka", parts=6, chunk=7))
    await fleet.open()
    late, *others = fleet.clients
    still = StopsBeforeAdopting(fleet.apps[0], monkeypatch, opening=opening)
    await fleet.send(20)
    for app in fleet.apps:
        await lab.start(app)
    await asyncio.wait_for(still.stopped.wait(), 30)
    for n, part in enumerate(sorted(still.parts)):
        late.move("default", part, others[n % 2])
    # The new readers get what it holds, and go on behind it.
    await lab.until(lambda: still.bodies <= {body for c in others for body, _ in c.settled})
    still.go_on.set()
    await fleet.send(5, start=20)
    await fleet.ends(25)
    assert still.verdicts is not None
    wanted = Answer.WAITING if opening else Answer.LEAVE
    assert {verdict.answer for verdict in still.verdicts} == {wanted}
    assert {verb for client in fleet.clients for _, verb in client.settled} == {Verb.ACK}


@pytest.mark.parametrize("like", ["sqs", "servicebus"])
async def test_a_lease_ends_before_the_messages_are_adopted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, like: Like
) -> None:
    fleet = Fleet(lab, PretendingBroker(like, lease_s=0.3))
    await fleet.open()
    late, *others = fleet.clients
    still = StopsBeforeAdopting(fleet.apps[0], monkeypatch, opening=True)
    await fleet.send(10)
    await lab.start(fleet.apps[0])
    await asyncio.wait_for(still.stopped.wait(), 30)
    assert not late.settled
    for app in fleet.apps[1:]:
        await lab.start(app)
    await lab.until(lambda: still.bodies <= {body for c in others for body, _ in c.settled})
    still.go_on.set()
    await fleet.send(5, start=10)
    await fleet.ends(15)


@pytest.mark.parametrize("seed", range(3))
async def test_parts_that_move_all_the_time(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A part of every second batch moves before the batch is adopted, which may take some turns."""
    dice = random.Random(seed)
    fleet = Fleet(lab, PretendingBroker("kafka", parts=4, chunk=6))
    await fleet.open()
    moves = 0
    for app in fleet.apps:
        adopt: Any = app.store.adopt_in_order

        async def late(
            sub: Subscription, batch: Sequence[Candidate], *, adopt: Any = adopt, **options: Any
        ) -> Any:
            nonlocal moves
            if dice.random() < 0.5:
                part = str(batch[0].delivery.part)
                fleet.clients[0].move("default", part, dice.choice(fleet.clients))
                moves += 1
            for _ in range(dice.randrange(50)):
                await asyncio.sleep(0)
            return await adopt(sub, batch, **options)

        monkeypatch.setattr(app.store, "adopt_in_order", late)
    await fleet.send(40)
    for app in fleet.apps:
        await lab.start(app)
    await fleet.ends(40)
    assert moves > 10


@pytest.mark.parametrize("like", KINDS)
async def test_all_workers_read_an_ordered_queue(lab: Lab, like: Like) -> None:
    fleet = Fleet(lab, PretendingBroker(like, parts=6, chunk=5))
    await fleet.open()
    for app in fleet.apps:
        await lab.start(app)
    members = fleet.clients[0]._group.members
    await lab.until(lambda: len(members.get("default", ())) == 3, "all of them read")
    await fleet.send(10)
    await fleet.ends(10)
    assert all(client.settled for client in fleet.clients), "a worker had nothing to read"


async def test_a_part_is_opened_by_a_message_without_a_key(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keyed messages behind it belong to a part that their worker owns."""
    app = await lab.open()
    broker = PretendingBroker("kafka", parts=1, chunk=3)
    await app.broker.close()
    app.brokers.by_name["default"] = broker
    await broker.open()
    answers: list[Answer] = []
    adopt: Any = app.store.adopt_in_order

    async def seen(*args: Any, **options: Any) -> Any:
        found = await adopt(*args, **options)
        answers.extend(verdict.answer for verdict in found or ())
        return found

    monkeypatch.setattr(app.store, "adopt_in_order", seen)
    ran: list[int] = []

    @app.on("step")
    async def step(ctx: Context) -> None:
        if ctx.message.ordering_key:
            ran.append(ctx.payload)

    keyless = [await app.send("step", n) for n in range(4)]
    keyed = [await app.send("step", n, ordering_key="k") for n in range(5)]
    await lab.start(app)
    await lab.ends(*(receipt.id for receipt in (*keyless, *keyed)))
    assert ran == list(range(5))
    assert answers == [Answer.WAITING] * 5


@pytest.mark.parametrize("like", KINDS)
async def test_parts_of_a_worker_that_leaves_and_comes_back(lab: Lab, like: Like) -> None:
    fleet = Fleet(lab, PretendingBroker(like, parts=6, chunk=5))
    await fleet.open()
    first, *_ = [await lab.start(app) for app in fleet.apps]
    await fleet.send(5)
    await lab.stop(first)
    await fleet.clients[0].close()
    await fleet.clients[0].open()  # to send; another one has its parts
    await fleet.send(5, start=5)
    await lab.start(fleet.apps[0])
    await fleet.send(5, start=10)
    await fleet.ends(15)
