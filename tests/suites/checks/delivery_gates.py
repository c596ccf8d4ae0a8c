"""Checks of a queue of replies: one place of many is down, and answers again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ackbone.core.outbound.delivery import Limit, New, Outbound, Sent, Settled
from ackbone.core.outbound.settling import FREED
from ackbone.core.store import Worker
from ackbone.testing.harness import expect
from tests.suites.delivery_harness import CHANNEL, DeliveryTrial, names

DOWN_S = 60.0


def _gate(place: str) -> Limit:
    return Limit(f"at {place}")


def _limits(reply: Outbound) -> Sequence[Limit]:
    """A recipient is `place/person`."""
    return [_gate(reply.recipient.partition("/")[0])]


async def _put(trial: DeliveryTrial, *names_: str, priority: int = 2) -> None:
    """Each to a person of its own, at the place that it is named after."""
    for name in names_:
        await trial.put(name, recipient=f"{name.partition(' ')[0]}/{name}", priority=priority)


async def _goes_down(trial: DeliveryTrial, worker: Worker, place: str) -> tuple[Outbound, Outbound]:
    """Two are under way there; one fails, and all others wait. The other may bring the answer."""
    await _put(trial, f"{place} failed", f"{place} probe")
    failed, probe = (await trial.take(worker)).replies
    await trial.again(worker, failed, 5.0, blocks=_gate(place), block_s=DOWN_S)
    return failed, probe


async def _answers(trial: DeliveryTrial, worker: Worker, probe: Outbound, place: str) -> None:
    bell = trial.queue.subscribe()
    bell.clear()
    back = Settled(reply=probe, result=Sent(), frees=_gate(place))
    await trial.queue.settle(trial.limits, [back], worker=worker)
    async with asyncio.timeout(30):
        await bell.wait()
    trial.queue.unsubscribe(bell)


async def what_was_put_off_goes_when_its_place_is_back(trial: DeliveryTrial) -> None:
    """At once, the urgent first and then the oldest; nobody else does."""
    worker = await trial.worker()
    trial.limits = {CHANNEL: _limits}
    _, probe = await _goes_down(trial, worker, "here")
    _, other = await _goes_down(trial, worker, "there")
    await _put(trial, "here 1", "there 1", "here 2", "calm 1")
    await _put(trial, "here urgent", priority=3)
    calm = await trial.one(worker)
    expect((calm.id, calm.is_back) == ("calm 1", False), f"{calm}")
    await trial.settle(worker, calm)
    next_s = await trial.none(worker)
    expect(next_s is not None and next_s <= 5.0, f"the failed ones come first: {next_s}")
    await _answers(trial, worker, probe, "here")
    taken = await trial.take(worker)
    expect(names(taken) == ["here urgent", "here 1", "here 2"], f"{names(taken)}")
    expect(all(reply.is_back for reply in taken.replies), "they say that it is back")
    await trial.settle(worker, *taken.replies)
    trial.clock.advance(5.0)
    expect((await trial.one(worker)).id == "here failed", "after its own wait")
    await trial.settle(worker, other)
    expect(await trial.none(worker) is not None, "over there nobody answered")
    trial.clock.advance(DOWN_S)
    expect(len((await trial.take(worker)).replies) == 2, "it is time to ask there")


async def a_place_that_is_down_again_is_not_back(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    trial.limits = {CHANNEL: _limits}
    _, probe = await _goes_down(trial, worker, "here")
    await _answers(trial, worker, probe, "here")
    await _put(trial, "here 1")
    again = await trial.one(worker)
    expect(again.is_back, "it answered somebody")
    await trial.again(worker, again, 0.0, blocks=_gate("here"), block_s=DOWN_S)
    expect(await trial.none(worker) is not None, "it is down")
    trial.clock.advance(DOWN_S)
    taken = await trial.take(worker)
    expect(sorted(names(taken)) == ["here 1", "here failed"], f"{names(taken)}")
    expect(not any(reply.is_back for reply in taken.replies), "nobody has heard from it since")


async def a_place_that_is_back_keeps_its_limits(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    chat = Limit("chat", 2, 10.0)
    trial.limits = {CHANNEL: lambda reply: [chat, *_limits(reply)]}
    _, probe = await _goes_down(trial, worker, "here")
    trial.clock.advance(10.0)  # the failed call counts no longer
    await _put(trial, "here 1", "here 2", "here 3")
    expect(await trial.none(worker) is not None, "it is down")
    await _answers(trial, worker, probe, "here")
    taken = await trial.take(worker)
    expect(len(taken.replies) == 1, f"the probe's call counts: {names(taken)}")


async def a_great_many_go_when_their_place_is_back(trial: DeliveryTrial) -> None:
    worker, many = await trial.worker(), FREED + 20
    trial.limits = {CHANNEL: _limits}
    _, probe = await _goes_down(trial, worker, "here")
    new = [
        New(id=f"r{n}", channel=CHANNEL, recipient=f"here/{n}", content="x") for n in range(many)
    ]
    await trial.queue.put(new)
    while (await trial.none(worker)) == 0:
        pass  # some at a time
    await _answers(trial, worker, probe, "here")
    sent: list[str] = []
    while taken := (await trial.take(worker, limit=500)).replies:
        sent += names(taken)
        await trial.settle(worker, *taken)
    expect(sent == [each.id for each in new], f"{len(sent)} of {many}, in their order")
