"""Each capability flag both ways: a claimed feature works, and a working feature is claimed."""

from __future__ import annotations

import asyncio
from unittest import SkipTest

from ackbone.core.broker import (
    Broker,
    Delivery,
    Extends,
    Outgoing,
    Subscription,
    Verb,
)
from ackbone.core.ids import new_id
from ackbone.testing.harness import Trial, bodies, expect, expect_same, outgoing

_EARLY_S = 0.02
_LONGEST_REAL_LEASE_S = 15.0


async def delay(trial: Trial) -> None:
    """A delayed message comes after its delay, not before. Others overtake it."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    after = trial.harness.delay_s
    late = Outgoing(id=new_id(), body=b"late", delay_s=after)
    prompt = Outgoing(id=new_id(), body=b"prompt")
    loop = asyncio.get_running_loop()
    start = loop.time()
    results = await broker.publish(sub.queue, [late, prompt])
    expect(results[1].ok, f"the message without a delay was refused: {results[1].error}")
    if not broker.capabilities.delay:
        wanted = [b"prompt"] if not results[0].ok else [b"late", b"prompt"]
        came = await trial.receive(broker, sub, len(wanted), ack=True)
        expect_same(wanted, bodies(came), "`delay` is not claimed: refused, or delivered")
        took = loop.time() - start
        expect(
            trial.harness.clock is not None or not results[0].ok or took < after,
            "`delay` is not claimed, and yet the message was held back",
        )
        return
    expect(results[0].ok, f"`delay` is claimed, and refused: {results[0].error}")
    first = await trial.receive(broker, sub, 1, ack=True)
    expect(bodies(first) == [b"prompt"], f"a delay of {after} s, and {bodies(first)} came first")
    if trial.harness.clock is not None:
        await _delay_by_clock(trial, broker, sub)
        return
    came = list(await trial.look(broker, sub, 5, wait=after + trial.harness.tolerance_s))
    took = loop.time() - start
    expect(bodies(came) == [b"late"], f"after {took:.2f} s: {bodies(came)} instead of the late one")
    expect(took >= after - _EARLY_S, f"a delay of {after} s was over after {took:.3f} s")
    await trial.settle(broker, sub, came, Verb.ACK)


async def _delay_by_clock(trial: Trial, broker: Broker, sub: Subscription) -> None:
    after = trial.harness.delay_s
    await trial.harness.pass_time(after * 0.9)
    await trial.expect_silence(broker, sub, "nine tenths of the delay are over")
    waiting = asyncio.create_task(trial.look(broker, sub, 5, wait=trial.harness.patience_s))
    await asyncio.sleep(0)
    await trial.harness.pass_time(after * 0.1 + 0.001)
    came = await waiting
    expect(bodies(came) == [b"late"], f"the delay is over, and {bodies(came)} came")
    await trial.settle(broker, sub, came, Verb.ACK)


async def priority(trial: Trial) -> None:
    """Higher priorities come first, equal ones as sent. Without the flag it has no effect."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    levels = [1, 0, 3, 2, 1, 3, 0, 2, 2, 1, 0, 3]
    batch = [
        Outgoing(id=new_id(), body=b"%02d" % i, priority=level) for i, level in enumerate(levels)
    ]
    await trial.publish(broker, sub, batch)
    came: list[Delivery] = []
    for _ in batch:
        came += await trial.receive(broker, sub, 1)
    expect_same([o.body for o in batch], bodies(came))
    order = [int(d.body) for d in came]
    if not broker.capabilities.priority:
        by_level = [levels[i] for i in order] == sorted(levels, reverse=True)
        expect(not by_level, "`priority` is not claimed, and yet messages came by priority")
        return
    expect(
        [levels[i] for i in order] == sorted(levels, reverse=True),
        f"priorities came as {[levels[i] for i in order]}",
    )
    if broker.capabilities.ordered:
        wanted = sorted(range(len(levels)), key=lambda i: -levels[i])
        expect(order == wanted, f"equal priorities came out of order: {order}, not {wanted}")
    kept = [d.priority for d in came] == [levels[i] for i in order]
    expect(kept, "Delivery.priority is not the one that was sent")


async def ordered(trial: Trial) -> None:
    """Messages of a queue come in the order sent, over batches and redeliveries."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    batch = outgoing(200)
    for start in range(0, len(batch), 20):
        await trial.publish(broker, sub, batch[start : start + 20])
    sent = [o.body for o in batch]
    head = await trial.receive(broker, sub, 30)
    if not broker.capabilities.ordered:
        rest = await trial.receive(broker, sub, len(batch) - len(head), ack=True)
        expect_same(sent, bodies([*head, *rest]))
        return
    expect(bodies(head) == sent[:30], "messages came out of order")
    await trial.settle(broker, sub, head[:10], Verb.ACK)
    await trial.reopen(broker)
    if broker.capabilities.lease_s is not None:
        await trial.harness.pass_time(broker.capabilities.lease_s)
    rest = await trial.receive(broker, sub, len(batch) - 10, ack=True)
    expect(bodies(rest) == sent[10:], "after a reopening messages came out of order")


async def ttl(trial: Trial) -> None:
    """An expired message is delivered, marked as expired. No message is dropped."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    life = trial.harness.delay_s
    plain = Outgoing(id=new_id(), body=b"plain")
    short = Outgoing(id=new_id(), body=b"short", ttl_s=life)
    sent_at = trial.harness.now_us()
    results = await broker.publish(sub.queue, [plain, short])
    expect(results[0].ok, f"the message without a ttl was refused: {results[0].error}")
    claimed = broker.capabilities.ttl
    if not claimed and not results[1].ok:
        await trial.receive(broker, sub, 1, ack=True)
        return
    expect(results[1].ok, f"`ttl` is claimed, and refused: {results[1].error}")
    await trial.harness.pass_time(life * 1.5)
    came = {d.body: d for d in await trial.receive(broker, sub, 2, ack=True)}
    expect(set(came) == {b"plain", b"short"}, f"{sorted(came)} came")
    expect(came[b"plain"].expires_at_us is None, "a message without a ttl has an end")
    ends = came[b"short"].expires_at_us
    if not claimed:
        expect(ends is None, "`ttl` is not claimed, and yet expires_at_us is set")
        return
    if ends is None:
        raise AssertionError("`ttl` is claimed, and expires_at_us is not set")
    apart = abs(ends - sent_at - life * 1_000_000) / 1_000_000
    expect(apart <= trial.harness.tolerance_s, f"expires_at_us is {apart:.3f} s off")
    expect(ends <= trial.harness.now_us(), "an expired message says that it is not")


async def lease(trial: Trial) -> None:
    """With `lease_s` an unsettled message comes back by itself. Without it, it does not."""
    broker = await trial.broker()
    span = broker.capabilities.lease_s
    if span is not None and trial.harness.clock is None and span > _LONGEST_REAL_LEASE_S:
        raise SkipTest(f"lease_s is {span}: let make_broker() use a short one for the suite")
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, outgoing(1))
    (held,) = await trial.receive(broker, sub, 1)
    if span is None:
        await trial.harness.pass_time(trial.harness.delay_s)
        await trial.expect_silence(broker, sub, "no lease is claimed, and the message is ours")
        await trial.settle(broker, sub, [held], Verb.ACK)
        return
    source = await trial.source(broker, sub)
    if isinstance(source, Extends):
        for _ in range(3):
            await trial.harness.pass_time(span / 2)
            await source.extend([held])
        await trial.expect_silence(broker, sub, "the lease was extended")
    await trial.harness.pass_time(span)
    (back,) = await trial.receive(broker, sub, 1)
    expect(back.body == held.body, "another message came back")
    expect(back.identity == held.identity, "it came back under another name")
    await trial.settle(broker, sub, [back], Verb.ACK)
