"""The server is restarted: accepted messages are still there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import SkipTest

from ackbone.core.broker import Broker, Durability, Outgoing, Result, Settlement, Subscription, Verb
from ackbone.testing.harness import AWAY, BrokerHarness, Trial, bodies, expect, outgoing
from ackbone.testing.signals import Signal

_STEP = 3
_DEADLINE_S = 60.0
_PAUSE_S = 0.01
"""Seconds between two tries while the server is away."""


async def restart_keeps_messages(trial: Trial) -> None:
    """Accepted messages, also unsettled ones, are there after a restart."""
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
    """Restarts after a third and after half of the messages lose no accepted message."""
    broker = await _durable(trial)
    sub = await trial.queue(broker)
    harness = trial.harness
    share = harness.restart_messages // harness.restart_publishers
    loads = [outgoing(share, prefix=f"p{i}") for i in range(harness.restart_publishers)]
    total = share * len(loads)
    accepted: Signal[bytes] = Signal("accepted messages")
    received: set[bytes] = set()
    consumer = asyncio.create_task(_consume(trial, broker, sub, received))
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
    # Deliveries of the cancelled consumer come back like all unsettled ones.
    await trial.reopen(broker)
    if broker.capabilities.lease_s is not None:
        await harness.pass_time(broker.capabilities.lease_s)
    received |= await _drain(trial, broker, sub, set(accepted.seen) - received)
    lost = set(accepted.seen) - received
    expect(len(accepted.seen) == total, f"{len(accepted.seen)} of {total} were accepted in the end")
    expect(not lost, f"{len(lost)} of {total} accepted messages were lost: {sorted(lost)[:5]}")


async def _durable(trial: Trial) -> Broker:
    """Return an open broker. Skip the check if the broker promises no durability."""
    broker = await trial.broker()
    told = type(trial.harness).restart is not BrokerHarness.restart
    if broker.capabilities.durability is Durability.NONE and not told:
        raise SkipTest("durability `none`: a restart may lose everything")
    return broker


async def _publish(
    broker: Broker, sub: Subscription, load: list[Outgoing], accepted: Signal[bytes]
) -> None:
    """Publish in small batches. Send again, with the same id, what was not clearly accepted."""
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


async def _consume(trial: Trial, broker: Broker, sub: Subscription, received: set[bytes]) -> None:
    while True:
        try:
            batch = await trial.look(broker, sub, 5, wait=0.5)
            received.update(bodies(batch))
            await (await trial.source(broker, sub)).settle(
                [Settlement(delivery=d, verb=Verb.ACK) for d in batch]
            )
        except AWAY:
            await asyncio.sleep(_PAUSE_S)


async def _drain(
    trial: Trial, broker: Broker, sub: Subscription, missing: set[bytes]
) -> set[bytes]:
    """Receive until all of `missing` came, or until no more come."""
    came: set[bytes] = set()
    loop = asyncio.get_running_loop()
    silent_since = loop.time()
    while not missing <= came and loop.time() - silent_since < trial.harness.patience_s:
        try:
            batch = await trial.look(broker, sub, 100)
            if batch:
                silent_since = loop.time()
            came.update(bodies(batch))
            await (await trial.source(broker, sub)).settle(
                [Settlement(delivery=d, verb=Verb.ACK) for d in batch]
            )
        except AWAY:
            await asyncio.sleep(_PAUSE_S)  # the server is not back yet
    return came


async def _reach(accepted: Signal[bytes], mark: int, load: asyncio.Future[list[None]]) -> None:
    """Wait until `mark` messages are accepted. An error of the publisher is raised at once."""
    waiting = asyncio.create_task(accepted.wait(mark, timeout=_DEADLINE_S))
    both: set[asyncio.Future[Any]] = {waiting, load}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if load.done():
        load.result()
    await waiting
