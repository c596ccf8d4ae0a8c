"""Single calls on the source of a subscription, for tests that look at one call at a time."""

from __future__ import annotations

from collections.abc import Sequence

from ackbone.core.broker import Broker, Delivery, Result, Settlement, Subscription

ROOM = 2000


async def receive(
    broker: Broker, sub: Subscription, *, limit: int, wait: float
) -> Sequence[Delivery]:
    source = await broker.subscribe(sub, room=ROOM)
    return await source.receive(limit=limit, wait=wait)


async def settle(
    broker: Broker, sub: Subscription, batch: Sequence[Settlement]
) -> Sequence[Result]:
    source = await broker.subscribe(sub, room=ROOM)
    return await source.settle(batch)
