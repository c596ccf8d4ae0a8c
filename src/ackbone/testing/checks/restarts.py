"""The server goes away and comes back: what it said yes to is still there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import SkipTest

from ackbone.core.broker import (
    Broker,
    Durability,
    Outgoing,
    Result,
    Settlement,
    Subscription,
    Verb,
)
from ackbone.testing.harness import AWAY, BrokerHarness, Trial, bodies, expect, outgoing
from ackbone.testing.signals import Signal

_STEP = 3
_DEADLINE_S = 60.0
_PAUSE_S = 0.01
"""Between two tries while the server is away."""


async def restart_keeps_messages(trial: Trial) -> None:
    """What was accepted, and what was in somebody's hands, is there after a restart."""
    broker = await _durable(trial)
    sub = await trial.queue(broker)
    batch = outgoing(100)
    await trial.publish(broker, sub, batch)
    held = await trial.receive(broker, sub, 30)
    await trial.settle(broker, sub, held[:10], Verb.ACK)
    await trial.harness.restart(broker)
    if broker.capabilities.lease_s is not None:
        await trial.harness.pass_time(broker.capabilities.lease_s)
    settled = {d.body for d in held[:10]}
    came = await _drain(trial, broker, sub, {o.body for o in batch} - settled)
    lost = {o.body for o in batch} - settled - came
    expect(not lost, f"{len(lost)} of 90 messages were lost with the restart: {sorted(lost)[:5]}")


async def restart_under_load(trial: Trial) -> None:
    """Restarts at a third and at half of the load: nothing that was accepted is lost."""
    broker = await _durable(trial)
    sub = await trial.queue(broker)
    harness = trial.harness
    share = harness.restart_messages // harness.restart_publishers
    loads = [outgoing(share, prefix=f"p{i}") for i in range(harness.restart_publishers)]
    total = share * len(loads)
    accepted: Signal[bytes] = Signal("accepted messages")
    received: set[bytes] = set()
    consumer = asyncio.create_task(_consume(broker, sub, received))
    publishers = asyncio.gather(*(_publish(broker, sub, load, accepted) for load in loads))
    try:
        for mark in (total // 3, total // 2):
            await _reach(accepted, mark, publishers)
            await harness.restart(broker)
        await asyncio.wait_for(publishers, _DEADLINE_S)
        if consumer.done():
            consumer.result()
    finally:
        consumer.cancel()
        publishers.cancel()
        await asyncio.gather(consumer, publishers, return_exceptions=True)
    # What the cancelled consumer was about to get comes back like any unsettled delivery.
    await trial.reopen(broker)
    if broker.capabilities.lease_s is not None:
        await harness.pass_time(broker.capabilities.lease_s)
    received |= await _drain(trial, broker, sub, set(accepted.seen) - received)
    lost = set(accepted.seen) - received
    expect(len(accepted.seen) == total, f"{len(accepted.seen)} of {total} were accepted in the end")
    expect(not lost, f"{len(lost)} of {total} accepted messages were lost: {sorted(lost)[:5]}")


async def _durable(trial: Trial) -> Broker:
    """An open broker; skips where neither the class nor the author promises anything."""
    broker = await trial.broker()
    told = type(trial.harness).restart is not BrokerHarness.restart
    if broker.capabilities.durability is Durability.NONE and not told:
        raise SkipTest("durability `none`: a restart may lose everything")
    return broker


async def _publish(
    broker: Broker, sub: Subscription, load: list[Outgoing], accepted: Signal[bytes]
) -> None:
    """Small batches; whatever is not a clear yes is sent again under the same id."""
    for start in range(0, len(load), _STEP):
        left = load[start : start + _STEP]
        while left:
            results: Sequence[Result] = ()
            with contextlib.suppress(*AWAY):
                async with asyncio.timeout(_DEADLINE_S):
                    results = await broker.publish(sub.queue, left)
            yes = {r.id for r in results if r.ok}
            for out in left:
                if out.id in yes:
                    accepted.emit(out.body)
            left = [out for out in left if out.id not in yes]
            await asyncio.sleep(_PAUSE_S if left else 0)


async def _consume(broker: Broker, sub: Subscription, received: set[bytes]) -> None:
    while True:
        try:
            batch = await broker.receive(sub, limit=5, wait=0.5)
            received.update(bodies(batch))
            await broker.settle(sub, [Settlement(delivery=d, verb=Verb.ACK) for d in batch])
        except AWAY:
            await asyncio.sleep(_PAUSE_S)


async def _drain(
    trial: Trial, broker: Broker, sub: Subscription, missing: set[bytes]
) -> set[bytes]:
    """Receive until nothing of `missing` is missing, or until silence."""
    came: set[bytes] = set()
    loop = asyncio.get_running_loop()
    silent_since = loop.time()
    while not missing <= came and loop.time() - silent_since < trial.harness.patience_s:
        try:
            batch = await broker.receive(sub, limit=100, wait=trial.harness.quiet_s)
            if batch:
                silent_since = loop.time()
            came.update(bodies(batch))
            await broker.settle(sub, [Settlement(delivery=d, verb=Verb.ACK) for d in batch])
        except AWAY:
            await asyncio.sleep(_PAUSE_S)  # still on its way back
    return came


async def _reach(accepted: Signal[bytes], mark: int, load: asyncio.Future[list[None]]) -> None:
    """Until `mark` messages are accepted; a publisher's own failure is raised at once."""
    waiting = asyncio.create_task(accepted.wait(mark, timeout=_DEADLINE_S))
    both: set[asyncio.Future[Any]] = {waiting, load}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if load.done():
        load.result()
    await waiting
