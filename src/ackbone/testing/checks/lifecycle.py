"""Waiting, wake-ups, opening, closing, a second client, health and statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ackbone.core.broker import (
    Broker,
    Delivery,
    Inspectable,
    Outgoing,
    QueueStats,
    Subscription,
    Verb,
)
from ackbone.core.errors import AckboneError
from ackbone.core.ids import new_id
from ackbone.testing.harness import Trial, bodies, expect, expect_same, outgoing

_EARLY_S = 0.02
"""Seconds by which timers of different clocks may differ."""


async def wait_is_bounded(trial: Trial) -> None:
    """On an empty queue `receive` returns an empty list after `wait` seconds, at once for 0."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    for wait in (0.0, 0.4):
        took, came = await _timed_receive(trial, broker, sub, wait)
        expect(not came, f"an empty queue gave {bodies(came)}")
        expect(took >= wait - _EARLY_S, f"wait={wait}: back after {took:.3f} s, too early")
        late = wait + trial.harness.tolerance_s
        expect(took <= late, f"wait={wait}: back only after {took:.3f} s")


async def publish_wakes_receive(trial: Trial) -> None:
    """A waiting `receive` returns when a message comes, long before its wait is over."""
    broker = await trial.broker()
    await _wakes(trial, broker, broker)


async def _wakes(trial: Trial, publisher: Broker, consumer: Broker) -> None:
    sub = await trial.queue(publisher)
    patience = trial.harness.patience_s + 5 * trial.harness.tolerance_s
    waiting = asyncio.create_task(_timed_receive(trial, consumer, sub, patience))
    # Nothing shows when a receive has begun to wait. Too short a pause only makes it easier.
    await asyncio.sleep(trial.harness.quiet_s)
    loop = asyncio.get_running_loop()
    sent = loop.time()
    await trial.publish(publisher, sub, outgoing(1))
    _, came = await waiting
    latency = loop.time() - sent
    expect(len(came) == 1, f"woken with {len(came)} messages instead of 1")
    expect(
        latency <= trial.harness.tolerance_s,
        f"the message came {latency:.3f} s after it was sent, to a receive that was waiting for it",
    )
    await trial.settle(consumer, sub, came, Verb.ACK)


async def cancelled_receive_loses_nothing(trial: Trial) -> None:
    """A `receive` that is cancelled while it waits takes no message with it."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    waiting = asyncio.create_task(trial.look(broker, sub, 5, wait=trial.harness.patience_s))
    await asyncio.sleep(trial.harness.quiet_s)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    batch = outgoing(3)
    await trial.publish(broker, sub, batch)
    came = list(await trial.look(broker, sub, 3))
    if len(came) < len(batch):
        # The cancelled call may have received some. Closing must bring them back.
        await trial.reopen(broker)
        came = await trial.receive(broker, sub, len(batch))
    expect_same([o.body for o in batch], bodies(came))


async def close_ends_receive(trial: Trial) -> None:
    """Closing ends a wait at once, with an empty list or an error of ackbone."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    patience = trial.harness.patience_s + 5 * trial.harness.tolerance_s
    waiting = asyncio.create_task(trial.look(broker, sub, 1, wait=patience))
    await asyncio.sleep(trial.harness.quiet_s)
    await broker.close()
    done, _ = await asyncio.wait({waiting}, timeout=trial.harness.tolerance_s)
    expect(bool(done), "receive still waits after the broker was closed")
    error = waiting.exception()
    expect(
        error is None or isinstance(error, AckboneError),
        f"closing made receive raise {error!r}, which is no error of ackbone",
    )
    if error is None:
        expect(not waiting.result(), "a closed broker gave a delivery")


async def open_and_close_again(trial: Trial) -> None:
    """Opening twice and closing twice do no harm, and a closed broker can be opened again."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    await broker.open()
    await trial.publish(broker, sub, outgoing(1))
    await broker.close()
    await broker.close()
    await broker.open()
    await broker.open()
    await trial.receive(broker, sub, 1, ack=True)
    await trial.publish(broker, sub, outgoing(1))
    await trial.receive(broker, sub, 1, ack=True)


async def closed_broker_never_lies(trial: Trial) -> None:
    """Publishing on a closed broker fails, or the message is there after it was opened."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    await broker.close()
    out = Outgoing(id=new_id(), body=b"while closed")
    try:
        results = await broker.publish(sub.queue, [out])
    except AckboneError:
        accepted = False
    else:
        accepted = all(r.ok for r in results) and len(results) == 1
    await broker.open()
    if accepted:
        await trial.receive(broker, sub, 1, ack=True)
    else:
        await trial.expect_silence(broker, sub, "the publish on a closed broker was refused")


async def second_client(trial: Trial) -> None:
    """Two clients: messages reach and wake the other one, and only one has each at a time."""
    first = await trial.broker()
    other = await trial.second(first)
    await _wakes(trial, first, other)
    if first.capabilities.parts:
        return  # two clients cannot share the messages of a part: see `parts`
    sub = await trial.queue(first)
    batch = outgoing(20)
    await trial.publish(first, sub, batch)
    mine = await trial.receive(first, sub, 8)
    await (await trial.source(first, sub)).pause()  # it may have read more than it received
    theirs = await trial.receive(other, sub, 12)
    expect_same([o.body for o in batch], bodies([*mine, *theirs]))
    await trial.expect_silence(first, sub, "the rest is in the other client's hands")
    await trial.settle(other, sub, theirs, Verb.ACK)
    if first.capabilities.lease_s is not None:
        return  # Messages of a closed client come back after its lease.
    await first.close()
    back = await trial.receive(other, sub, len(mine), ack=True)
    expect_same(bodies(mine), bodies(back), "what the closed client held")
    await trial.expect_silence(other, sub, "everything was acknowledged")


async def pause_hands_back(trial: Trial) -> None:
    """A paused source keeps no message that was not received. Those that were can be settled."""
    first = await trial.broker()
    other = await trial.second(first)
    sub = await trial.queue(first)
    if first.capabilities.parts:
        await _pauses(trial, first, sub)
        return
    batch = outgoing(10)
    await trial.publish(first, sub, batch)
    mine = await trial.receive(first, sub, 4)
    source = await trial.source(first, sub)
    await source.pause()
    await source.pause()
    theirs = await trial.receive(other, sub, 6)
    expect_same([o.body for o in batch], bodies([*mine, *theirs]))
    await trial.settle(first, sub, mine, Verb.ACK)
    await trial.settle(other, sub, theirs, Verb.ACK)
    await (await trial.source(other, sub)).pause()
    await trial.publish(other, sub, outgoing(1, prefix="next"))
    (came,) = await trial.receive(first, sub, 1, ack=True)
    expect(came.body.startswith(b"next"), f"after the pause came {came.body!r}")


async def _pauses(trial: Trial, broker: Broker, sub: Subscription) -> None:
    """The same for parts, which another client does not get from a reader that is paused."""
    batch = outgoing(10)
    await trial.publish(broker, sub, batch)
    mine = await trial.receive(broker, sub, 4)
    await (await trial.source(broker, sub)).pause()
    await trial.settle(broker, sub, mine, Verb.ACK)
    rest = await trial.receive(broker, sub, 6, ack=True)
    expect_same([o.body for o in batch], bodies([*mine, *rest]))


async def health(trial: Trial) -> None:
    """`health` is ok while the broker is open, gives a reason after it was closed, never raises."""
    broker = await trial.broker()
    now = await broker.health()
    expect(now.ok, f"an open broker says: {now.detail or 'not ok, without a reason'}")
    await broker.close()
    now = await broker.health()
    expect(not now.ok, "a closed broker says that it can be used")
    expect(bool(now.detail), "a closed broker gives no reason")


async def stats(trial: Trial) -> None:
    """Statistics are right within one message, and the age grows from the time of sending."""
    broker = await trial.broker()
    if not isinstance(broker, Inspectable):
        return
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, outgoing(12))
    late = [Outgoing(id=new_id(), body=b"late", delay_s=3600.0) for _ in range(4)]
    delayed = 4 if broker.capabilities.delay else 0
    if delayed:
        await trial.publish(broker, sub, late)
    held = await trial.receive(broker, sub, 5)
    await trial.settle(broker, sub, held[:2], Verb.ACK)
    seen = _of(sub, await broker.stats())
    want = {"ready": 7, "in_flight": 3, "delayed": delayed}
    for name, number in want.items():
        got: int = getattr(seen, name)
        expect(abs(got - number) <= 1, f"stats: {name} is {got}, not {number}")
    await _age_grows(trial, broker, sub, seen.oldest_age_s)
    await trial.settle(broker, sub, held[2:], Verb.ACK)
    await trial.receive(broker, sub, 7, ack=True)
    seen = _of(sub, await broker.stats())
    expect(seen.ready <= 1 and seen.in_flight <= 1, f"stats of an emptied queue: {seen}")


async def _age_grows(
    trial: Trial, broker: Inspectable, sub: Subscription, age: float | None
) -> None:
    if age is None:
        return  # not known
    expect(0 <= age < 300, f"stats: oldest_age_s is {age} just after sending")
    await trial.harness.pass_time(trial.harness.delay_s)
    later = _of(sub, await broker.stats()).oldest_age_s
    expect(
        later is not None and later - age >= trial.harness.delay_s * 0.9,
        f"stats: oldest_age_s was {age} and is {later} after {trial.harness.delay_s} s",
    )


def _of(sub: Subscription, everything: Sequence[QueueStats]) -> QueueStats:
    empty = QueueStats(queue=sub.queue, ready=0)
    return next((entry for entry in everything if entry.queue == sub.queue), empty)


async def _timed_receive(
    trial: Trial, broker: Broker, sub: Subscription, wait: float
) -> tuple[float, Sequence[Delivery]]:
    loop = asyncio.get_running_loop()
    start = loop.time()
    came = await trial.look(broker, sub, 10, wait=wait)
    return loop.time() - start, came
