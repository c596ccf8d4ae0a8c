"""ACK, RELEASE and REJECT: a settled message stays settled, an unsettled one comes back."""

from __future__ import annotations

from ackbone.core.broker import Broker, Identity, Outgoing, Settlement, Subscription, Verb
from ackbone.core.ids import new_id
from ackbone.testing.harness import Trial, bodies, expect, expect_same, outgoing


async def ack_is_final(trial: Trial) -> None:
    """An acknowledged message never comes again, not even after the broker was reopened."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, outgoing(10))
    await trial.receive(broker, sub, 10, ack=True)
    await trial.expect_silence(broker, sub, "everything was acknowledged")
    await trial.reopen(broker)
    await trial.expect_silence(broker, sub, "everything was acknowledged before the reopening")


async def unsettled_comes_back(trial: Trial) -> None:
    """An unsettled message does not come again while the broker is open, but after it was
    closed."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    keys = [str(i) if broker.capabilities.parts else "k" for i in range(9)]  # a part may be blocked
    sent = [
        Outgoing(id=new_id(), body=b"%d" % i, headers={"x-n": str(i)}, key=key)
        for i, key in enumerate(keys)
    ]
    await trial.publish(broker, sub, sent)
    first = await trial.receive(broker, sub, 6)
    acked, kept = first[:2], first[2:]
    await trial.settle(broker, sub, acked, Verb.ACK)
    rest = await trial.receive(broker, sub, 3)
    if broker.capabilities.lease_s is None:
        await trial.expect_silence(broker, sub, "every message is in our hands")
    await trial.reopen(broker)
    await _let_leases_end(trial, broker)
    back = await trial.receive(broker, sub, 7)
    expect_same(bodies([*kept, *rest]), bodies(back), "unsettled messages")
    before = {d.body: d for d in [*kept, *rest]}
    for came in back:
        expect(came.headers.get("x-n") == came.body.decode(), "a redelivery lost its headers")
        if trial.harness.counts_deliveries:
            old = before[came.body].count
            expect(came.count > old, f"count was {old}, is {came.count} on the redelivery")
    await trial.settle(broker, sub, back, Verb.ACK)
    await trial.expect_silence(broker, sub, "everything was acknowledged")


async def release(trial: Trial) -> None:
    """RELEASE brings a message back at once. Without the flag, it is at least not lost."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    sent = [Outgoing(id=new_id(), body=b"%d" % i, headers={"x-n": str(i)}) for i in range(3)]
    await trial.publish(broker, sub, sent)
    first = await trial.receive(broker, sub, 3)
    if not broker.capabilities.release:
        await (await trial.source(broker, sub)).settle(
            [Settlement(delivery=d, verb=Verb.RELEASE) for d in first]
        )
        early = await trial.look(broker, sub, 3)
        expect(not early, "`release` is not claimed, and yet a released message came at once")
        await trial.reopen(broker)
        await _let_leases_end(trial, broker)
        back = await trial.receive(broker, sub, 3, ack=True)
        expect_same(bodies(first), bodies(back), "released messages")
        return
    await trial.settle(broker, sub, first[:2], Verb.RELEASE)
    back = await trial.receive(broker, sub, 2)
    expect_same(bodies(first[:2]), bodies(back), "released messages")
    for came in back:
        old = next(d for d in first if d.body == came.body)
        expect(came.headers.get("x-n") == came.body.decode(), "a release lost the headers")
        if trial.harness.counts_deliveries:
            expect(
                came.count > old.count, f"count was {old.count}, is {came.count} after a release"
            )
    await trial.expect_silence(broker, sub, "the third message is still in our hands")
    await trial.settle(broker, sub, [*back, first[2]], Verb.ACK)
    await trial.expect_silence(broker, sub, "everything was acknowledged")


async def release_with_delay(trial: Trial) -> None:
    """RELEASE with a delay: the message waits if `delay` is claimed, and is never lost."""
    broker = await trial.broker()
    if not (broker.capabilities.delay and broker.capabilities.release):
        return  # The engine keeps such a message in its store; the broker claims nothing here.
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, outgoing(1))
    first = await trial.receive(broker, sub, 1)
    await trial.settle(broker, sub, first, Verb.RELEASE, delay_s=trial.harness.delay_s)
    await trial.expect_silence(broker, sub, "the message was released with a delay")
    await trial.harness.pass_time(trial.harness.delay_s)
    back = await trial.receive(broker, sub, 1, ack=True)
    expect_same(bodies(first), bodies(back), "the released message")


async def reject(trial: Trial) -> None:
    """REJECT removes a message for good. Without the flag, it is refused and the message kept."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, outgoing(2))
    bad, good = await trial.receive(broker, sub, 2)
    results = await (await trial.source(broker, sub)).settle(
        [Settlement(delivery=bad, verb=Verb.REJECT, reason="suite: not wanted")]
    )
    expect(len(results) == 1, f"1 settled, {len(results)} results")
    claimed = broker.capabilities.reject
    if claimed:
        expect(results[0].ok, f"`reject` is claimed, and refused: {results[0].error}")
    else:
        expect(not results[0].ok, "`reject` is not claimed, and yet it is said to be done")
    await trial.settle(broker, sub, [good], Verb.ACK)
    await trial.reopen(broker)
    await _let_leases_end(trial, broker)
    if not claimed:
        back = await trial.receive(broker, sub, 1, ack=True)
        expect(back[0].body == bad.body, "another message than the refused one came back")
        return
    await trial.expect_silence(broker, sub, "the message was rejected")
    dead = await trial.harness.dead_letters(broker, sub.queue)
    if dead is not None:
        expect_same([bad.body], dead, "the dead-letter place")


async def settle_twice(trial: Trial) -> None:
    """Settling again, with the same verb or another one, changes nothing."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, outgoing(3))
    first = await trial.receive(broker, sub, 3)
    await trial.settle(broker, sub, first[:1], Verb.ACK)
    await trial.settle(broker, sub, first[:1], Verb.ACK)
    for verb in (Verb.RELEASE, Verb.ACK):
        if verb is Verb.ACK or broker.capabilities.release:
            await trial.settle(broker, sub, first[:1], verb)
    # Also twice in one batch.
    await trial.settle(broker, sub, [first[1], first[1]], Verb.ACK)
    await trial.expect_silence(broker, sub, "two are acknowledged, one is in our hands")
    await trial.settle(broker, sub, [first[2]], Verb.ACK)
    await trial.publish(broker, sub, outgoing(1, prefix="next"))
    (came,) = await trial.receive(broker, sub, 1, ack=True)
    expect(came.body.startswith(b"next"), f"the next message is {came.body!r}")


async def settle_stale(trial: Trial) -> None:
    """Settling a delivery from before a reopening does not affect other messages."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, outgoing(4))
    old = await trial.receive(broker, sub, 4)
    await trial.reopen(broker)
    await _let_leases_end(trial, broker)
    stale = max(old, key=lambda d: d.body)
    await _settle_harmlessly(trial, broker, sub, Settlement(delivery=stale, verb=Verb.ACK))
    # The late ACK may or may not have reached its own message. The other three must come.
    back = await trial.receive(broker, sub, 3)
    back += await trial.look(broker, sub, 5)
    others = [d.body for d in back if d.body != stale.body]
    expect_same([d.body for d in old if d.body != stale.body], others, "the other messages")
    await trial.settle(broker, sub, back, Verb.ACK)
    await trial.expect_silence(broker, sub, "everything was acknowledged")


async def settle_foreign(trial: Trial) -> None:
    """Settling a delivery of another client does not affect other messages."""
    first = await trial.broker()
    other = await trial.second(first)
    sub = await trial.queue(first)
    await trial.publish(first, sub, outgoing(4))
    mine = await trial.receive(first, sub, 2)
    if first.capabilities.parts:  # a delivery of another client is one of a part that moved
        await first.close()
        await _let_leases_end(trial, first)
        theirs = await trial.receive(other, sub, 4)
        await first.open()
        await _settle_harmlessly(trial, first, sub, Settlement(delivery=mine[0], verb=Verb.ACK))
        await trial.settle(other, sub, theirs, Verb.ACK)
        await trial.expect_silence(other, sub, "everything was acknowledged")
        return
    await (await trial.source(first, sub)).pause()  # it may have read more than it received
    theirs = await trial.receive(other, sub, 2)
    await _settle_harmlessly(trial, first, sub, Settlement(delivery=theirs[0], verb=Verb.ACK))
    await trial.settle(first, sub, mine, Verb.ACK)
    await trial.settle(other, sub, theirs, Verb.ACK)
    await trial.expect_silence(first, sub, "everything was acknowledged")
    await (await trial.source(first, sub)).pause()
    await trial.publish(first, sub, outgoing(1, prefix="next"))
    (came,) = await trial.receive(other, sub, 1, ack=True)
    expect(came.body.startswith(b"next"), f"the next message is {came.body!r}")


async def mixed_settlements(trial: Trial) -> None:
    """One batch with several verbs: each item gets its own."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    await trial.publish(broker, sub, outgoing(6))
    first = await trial.receive(broker, sub, 6)
    back_verb = Verb.RELEASE if broker.capabilities.release else Verb.ACK
    verbs = [Verb.ACK, back_verb] * 3
    results = await (await trial.source(broker, sub)).settle(
        [Settlement(delivery=d, verb=v) for d, v in zip(first, verbs, strict=True)]
    )
    expect([r.ok for r in results] == [True] * 6, f"results: {[str(r.error) for r in results]}")
    released = [d for d, v in zip(first, verbs, strict=True) if v is Verb.RELEASE]
    back = await trial.receive(broker, sub, len(released), ack=True)
    expect_same(bodies(released), bodies(back), "released messages")
    await trial.expect_silence(broker, sub, "everything was acknowledged")


async def identity(trial: Trial) -> None:
    """The identity of a message is the same on each redelivery and unique. With identity `none`,
    some or all messages have None instead."""
    broker = await trial.broker()
    sub = await trial.queue(broker)
    twin = outgoing(1)[0]
    batch = [*outgoing(3), twin, Outgoing(id=new_id(), body=twin.body)]
    await trial.publish(broker, sub, batch)
    first = await trial.receive(broker, sub, 5)
    names = [d.identity for d in first]
    given = [name for name in names if name is not None]
    if broker.capabilities.identity is not Identity.NONE:
        expect(all(names), f"identity `broker` is claimed, and yet there is {names}")
    expect(len(set(given)) == len(given), f"two messages share a name: {names}")
    await trial.reopen(broker)
    await _let_leases_end(trial, broker)
    again = {d.identity: d.body for d in await trial.receive(broker, sub, 5) if d.identity}
    named = {d.identity: d.body for d in first if d.identity}
    expect(again == named, "a redelivery has another name")


async def _settle_harmlessly(
    trial: Trial, broker: Broker, sub: Subscription, settlement: Settlement
) -> None:
    results = await (await trial.source(broker, sub)).settle([settlement])
    expect(len(results) == 1, f"1 settled, {len(results)} results")


async def _let_leases_end(trial: Trial, broker: Broker) -> None:
    """Let the lease pass, if deliveries come back only after it."""
    lease = broker.capabilities.lease_s
    if lease is not None:
        await trial.harness.pass_time(lease)
