"""What a fetcher has in its hands when it is stopped."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from holdfast.brokers.memory import MemoryBroker
from holdfast.core.broker import Delivery, Outgoing, Subscription
from holdfast.core.errors import StoreUnavailable
from holdfast.core.message import Message
from holdfast.core.standard_codec import StandardCodec
from holdfast.core.store import Candidate, Claims, Run, Verdict, Worker
from holdfast.engine.decoder import decoder
from holdfast.engine.fetcher import BrokerFetcher, Slots

SUB = Subscription(name="jobs", queue="jobs", ordered=False)


class Idle:
    """A worker that starts nothing."""

    worker = Worker(worker_id=1)

    def may_fetch(self, sub: Subscription) -> float:
        return 0.0

    def start(self, runs: Sequence[Run], sub: Subscription) -> None: ...

    def seen(self, sub: Subscription, verdicts: Sequence[Verdict]) -> None: ...

    def unclaimed(self, sub: Subscription, messages: int) -> None: ...


class Away:
    """A store that is away."""

    async def claim(self, sub: Subscription, batch: Sequence[Candidate], **_: Any) -> None:
        raise StoreUnavailable("away")


@pytest.mark.parametrize("slots_left", [0, 4], ids=["no slot is left", "the store is away"])
async def test_what_was_received_and_not_claimed_goes_back(
    slots_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker()
    await broker.open()
    sent = [Message(type="n", id=f"m{n}") for n in range(4)]
    bodies = [StandardCodec().encode(message)[0] for message in sent]
    await broker.publish(
        "jobs", [Outgoing(id=m.id, body=body) for m, body in zip(sent, bodies, strict=True)]
    )
    slots, in_hand, receive = Slots(4), asyncio.Event(), broker.receive

    async def receive_and_lose_the_slots(*args: Any, **options: Any) -> Sequence[Delivery]:
        found = await receive(*args, **options)
        slots.take(4 - slots_left)  # as the fetcher beside it does
        in_hand.set()
        return found

    monkeypatch.setattr(broker, "receive", receive_and_lose_the_slots)
    fetcher = BrokerFetcher(
        SUB, cast(Claims, Away()), broker, decoder(SUB), slots, Idle(), broker.settle
    )
    fetching = asyncio.ensure_future(fetcher._fetch(4))
    await in_hand.wait()
    for _ in range(10):
        await asyncio.sleep(0)  # on to where it waits
    fetching.cancel()
    await asyncio.wait({fetching})
    assert fetching.cancelled()
    again = await receive(SUB, limit=10, wait=0.0)
    assert [delivery.body for delivery in again] == bodies
    await broker.close()


async def test_whoever_waits_for_a_slot_finds_one() -> None:
    """Two were woken by one free slot, and the other was faster: no room is no answer."""
    slots = Slots(1)
    slots.take(1)
    waiting = [asyncio.ensure_future(slots.reserve(1)), asyncio.ensure_future(slots.room())]
    await asyncio.sleep(0)
    slots.give(1)
    assert await waiting[0] == 1
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting[1].done()
    slots.give(1)
    assert await waiting[1] == 1
