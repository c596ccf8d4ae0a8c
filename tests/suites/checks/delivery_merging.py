"""Checks of a queue of replies: several that go out by one call."""

from __future__ import annotations

from collections.abc import Sequence

from ackbone.core import events
from ackbone.core.errors import StoreUnavailable
from ackbone.core.outbound.delivery import Again, Fits, Limit, Outbound, Result, Sent, Settled
from ackbone.core.store import Worker
from ackbone.testing.harness import expect, fail
from tests.suites.delivery_harness import CHANNEL, DeliveryTrial, names


def _all(replies: Sequence[Outbound]) -> bool:
    return True


async def _followers(
    trial: DeliveryTrial, worker: Worker, head: Outbound, fits: Fits = _all, limit: int = 100
) -> Sequence[Outbound]:
    return await trial.queue.follow(head, fits, limit=limit, worker=worker)


async def _settle(
    trial: DeliveryTrial, worker: Worker, replies: Sequence[Outbound], result: Result
) -> None:
    """As one call: that of the first."""
    batch = [Settled(reply=reply, result=result, counts=reply is replies[0]) for reply in replies]
    await trial.queue.settle(trial.limits, batch, worker=worker)


async def those_behind_follow(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a")
    await trial.put("else", recipient="bob")
    head, other = (await trial.take(worker)).replies
    expect(not await _followers(trial, worker, head), "nobody is there")
    await trial.put("b", "c", "d")
    found = await _followers(trial, worker, head, limit=2)
    expect(names(found) == ["b", "c"], f"{names(found)}")
    expect(found[0].content == "text of b" and found[0].call == 1, f"{found[0]}")
    expect(not await _followers(trial, worker, other), "they are another conversation's")
    expect(await trial.none(worker) is None, "they are under way")
    await _settle(trial, worker, [head, *found], Sent(receipt="n"))
    expect(trial.told_ids(events.DELIVERY_SENT) == ["a", "b", "c"], f"{trial.events}")
    expect((await trial.one(worker)).id == "d", "it is its turn")


async def the_first_that_cannot_is_the_last_that_is_looked_at(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    lanes = ("options", "expired", "long")
    for lane in lanes:
        await trial.put(f"{lane} 1", f"{lane} 2", recipient=lane)
    await trial.put("options 3", recipient="options", options={"buttons": ["yes"]})
    await trial.put("expired 3", recipient="expired", expires_s=10.0)
    await trial.put("long 3", recipient="long")
    for lane in lanes:
        await trial.put(f"{lane} 4", recipient=lane)
    trial.clock.advance(11)
    for head in (await trial.take(worker)).replies:
        found = await _followers(
            trial, worker, head, lambda replies: replies[-1].content != "text of long 3"
        )
        expect(names(found) == [f"{head.recipient} 2"], f"{names(found)}")
        await _settle(trial, worker, [head, *found], Sent())
    left = names(await trial.take(worker))
    expect(left == ["options 3", "long 3", "expired 4"], f"{left}")


async def only_its_sender_is_followed(trial: DeliveryTrial) -> None:
    worker, other, dead = [await trial.worker() for _ in range(3)]
    await trial.put("a", "b", "c")
    head = await trial.one(worker)
    expect(not await _followers(trial, other, head), "another sends it")
    await trial.again(worker, head, 0.0)
    expect(not await _followers(trial, worker, head), "it is not under way")
    again = await trial.one(dead)
    expect(not await _followers(trial, dead, head), "that was an earlier call")
    await trial.die(dead)
    await trial.reap(worker)
    try:
        await _followers(trial, dead, again)
    except StoreUnavailable:
        return
    fail("what it took, another would have got at once")


async def what_failed_together_goes_alone(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a", "b", "c", "d", "e")
    head = await trial.one(worker)
    found = await _followers(trial, worker, head, limit=2)
    again = Again(error="no luck", wait_s=5.0, in_doubt=True)
    await _settle(trial, worker, [head, *found], again)
    expect(trial.told_ids(events.DELIVERY_WAITING) == ["a", "b", "c"], f"{trial.events}")
    trial.clock.advance(5)
    for name in "abc":
        reply = await trial.one(worker)
        expect((reply.id, reply.call, reply.retry_count) == (name, 2, 1), f"{reply}")
        expect(reply.in_doubt, "it may have arrived")
        expect(name == "c" or not await _followers(trial, worker, reply), f"behind {name}")
        await trial.settle(worker, reply)
    reply = await trial.one(worker)
    expect(names(await _followers(trial, worker, reply)) == ["e"], "these are new")


async def the_dead_leave_all_of_them_in_doubt(trial: DeliveryTrial) -> None:
    dead, worker = await trial.worker(), await trial.worker()
    await trial.put("a", "b", "c", "d")
    head = await trial.one(dead)
    found = await _followers(trial, dead, head, limit=2)
    await trial.die(dead)
    await trial.reap(worker)
    expect(await trial.queue.recover(worker=worker) == 3, "what it was sending")
    await _settle(trial, dead, [head, *found], Sent())
    for name in "abcd":
        reply = await trial.one(worker)
        expect((reply.id, reply.in_doubt) == (name, name != "d"), f"{reply}")
        await trial.settle(worker, reply)
    expect(trial.told_ids(events.DELIVERY_RESENT) == ["a", "b", "c"], f"{trial.events}")


async def one_call_counts_once(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    trial.limits = {CHANNEL: lambda reply: [Limit("bot", 2, 10.0, whole_channel=True)]}
    await trial.put("a", "b", "c", "d", "e")
    head = await trial.one(worker)
    found = await _followers(trial, worker, head, limit=2)
    await _settle(trial, worker, [head, *found], Sent())
    second = await trial.one(worker)
    expect(second.id == "d", "the three were one call")
    await trial.settle(worker, second)
    next_s = await trial.none(worker)
    expect(next_s is not None and 9.5 <= next_s <= 10.0, f"and that was the second: {next_s}")
