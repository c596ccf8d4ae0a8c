"""Checks of a queue of replies: limits of channels and places, and a great many that wait."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from ackbone.core.events import DELIVERY_WAITING
from ackbone.core.outbound.delivery import Limit, New, Outbound, Sent, Settled
from ackbone.core.store import Worker
from ackbone.testing.harness import expect
from tests.suites.delivery_harness import CHANNEL, DeliveryTrial, names

FEW, MANY, BATCH = 400, 30_000, 2000
SLACK_S = 0.02


def of_chat(count: int, per_s: float) -> Limit:
    return Limit("", count, per_s)


def limits(*wanted: Limit) -> object:
    """A limit without a key is one for each recipient."""

    def of(reply: Outbound) -> Sequence[Limit]:
        return [
            limit if limit.key else Limit(f"chat {reply.recipient}", limit.count, limit.per_s)
            for limit in wanted
        ]

    return of


def _limit(trial: DeliveryTrial, *wanted: Limit) -> None:
    trial.limits = {CHANNEL: limits(*wanted)}  # type: ignore[dict-item] # it is a Limits


async def a_place_at_its_limit_lets_others_go(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    _limit(trial, of_chat(2, 10.0))
    for n in range(4):
        await trial.put(f"a{n}", conversation=f"k{n}")
    await trial.put("b", recipient="bob")
    taken = await trial.take(worker)
    expect(names(taken) == ["a0", "a1", "b"], f"{names(taken)}")
    await trial.settle(worker, *taken.replies)
    trial.clock.advance(9.9)
    next_s = await trial.none(worker)
    expect(next_s is not None and next_s <= 0.11, f"free in 0.1 s, not {next_s}")
    trial.clock.advance(0.1)
    expect(names(await trial.take(worker)) == ["a2", "a3"], "they are free")


async def a_channel_at_its_limit_stops(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    _limit(trial, Limit("bot", 3, 10.0, whole_channel=True))
    for n in range(5):
        await trial.put(f"r{n}", recipient=f"chat {n}")
    taken = await trial.take(worker)
    expect(names(taken) == ["r0", "r1", "r2"], f"{names(taken)}")
    await trial.settle(worker, *taken.replies)
    for waited_s in (0, 4):
        trial.clock.advance(waited_s)
        next_s = await trial.none(worker)
        left_s = 10.0 - waited_s
        expect(next_s is not None and left_s - 0.1 <= next_s <= left_s, f"not {next_s}")
    await trial.put("urgent", recipient="bob", priority=3)
    trial.clock.advance(6)
    expect(names(await trial.take(worker)) == ["urgent", "r3", "r4"], "the urgent first")


async def an_early_answer_frees_its_place(trial: DeliveryTrial) -> None:
    """A call that is under way may take minutes; one that was answered counts no longer."""
    worker = await trial.worker()
    _limit(trial, of_chat(1, 1.0))
    await trial.put("a", conversation="k")
    await trial.put("b", conversation="l")
    first = await trial.one(worker)
    expect(first.id == "a", first.id)
    next_s = await trial.none(worker)
    expect(next_s is not None and next_s <= 1.0, f"it is not known yet when: {next_s}")
    trial.clock.advance(0.3)
    await trial.settle(worker, first, ago_s=0.1)
    for wait_s in (0.7, 0.2):
        expect(not (await trial.take(worker)).replies, "too early")
        trial.clock.advance(wait_s)
    expect((await trial.one(worker)).id == "b", "a second after the answer")


async def told_to_wait_blocks_the_place(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    _limit(trial, of_chat(9, 1.0), Limit("bot", 9, 1.0, whole_channel=True))
    await trial.put("a", conversation="k")
    reply = await trial.one(worker)
    place = trial.limits[CHANNEL](reply)[0]
    await trial.again(worker, reply, 30.0, costs=False, blocks=place)
    await trial.put("b", conversation="l")
    await trial.put("c", recipient="bob")
    expect((await trial.one(worker)).id == "c", "only ann asked for patience")
    trial.clock.advance(29)
    expect(await trial.none(worker) is not None, "they wait")
    trial.clock.advance(1)
    expect(sorted(names(await trial.take(worker))) == ["a", "b"], "that was all")


async def told_to_wait_blocks_the_channel(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    for count in (9, None):  # one that counts, and one that can only be blocked
        bot = Limit(f"bot {count}", count, 1.0, whole_channel=True)
        _limit(trial, bot)
        await _blocked(trial, worker, bot)


async def _blocked(trial: DeliveryTrial, worker: Worker, bot: Limit) -> None:
    await trial.put(f"a {bot.count}")
    await trial.again(worker, await trial.one(worker), 30.0, costs=False, blocks=bot)
    await trial.put(f"b {bot.count}", recipient="bob")
    next_s = await trial.none(worker)
    expect(next_s is not None and 29 <= next_s <= 30, f"{next_s}")
    trial.clock.advance(30)
    taken = await trial.take(worker)
    expect(len(taken.replies) == 2, "that was all")
    await trial.settle(worker, *taken.replies)


async def an_answer_frees_a_place_that_was_down(trial: DeliveryTrial) -> None:
    """What was not tried in the meantime is due at once then, and nothing was told of it."""
    worker = await trial.worker()
    gate = Limit("gate", whole_channel=True)
    _limit(trial, gate)
    for name in ("a", "b", "c"):
        await trial.put(name, recipient=name)
    first, second, third = (await trial.take(worker)).replies
    await trial.again(worker, first, 5.0, blocks=gate, block_s=60.0)
    await trial.again(worker, second, 0.0, costs=False, tried=False, blocks=gate, block_s=60.0)
    next_s = await trial.none(worker)
    expect(next_s is not None and 59 <= next_s <= 60, f"{next_s}")
    bell = trial.queue.subscribe()
    bell.clear()
    back = Settled(reply=third, result=Sent(), frees=gate)
    await trial.queue.settle(trial.limits, [back], worker=worker)
    async with asyncio.timeout(30):
        await bell.wait()
    trial.queue.unsubscribe(bell)
    expect((await trial.one(worker)).id == second.id, "the other waits for its own retry")
    expect(trial.told_ids(DELIVERY_WAITING) == [first.id], "one was tried, and failed")


async def a_dead_senders_call_counts_no_longer(trial: DeliveryTrial) -> None:
    dead, worker = await trial.worker(), await trial.worker()
    _limit(trial, of_chat(1, 5.0))
    await trial.put("a")
    await trial.one(dead)
    await trial.die(dead)
    await trial.reap(worker)
    trial.clock.advance(1)
    await trial.queue.recover(worker=worker)
    expect(not (await trial.take(worker)).replies, "it may have been made just now")
    trial.clock.advance(5)
    expect((await trial.one(worker)).in_doubt, "it is free, and may be there already")


async def limits_hold_and_are_used(trial: DeliveryTrial) -> None:
    """Two senders, calls that take their time: never above any limit where they arrive, and never
    idle while something may go."""
    chance = random.Random(7)
    other = await trial.another()
    desks = [(trial, await trial.worker()), (other, await other.worker())]
    chat, bot = (3, 10.0), (7, 10.0)
    for desk, _ in desks:
        _limit(desk, of_chat(*chat), Limit("bot", *bot, whole_channel=True))
    total = 60
    for n in range(total):
        await trial.put(f"r{n:02}", recipient=f"chat {n % 4}", conversation=f"k{n}")
    arrivals: list[tuple[float, str]] = []
    calls: list[tuple[float, DeliveryTrial, Worker, Outbound]] = []
    now, step_s = 0.0, 0.5
    while len(arrivals) < total or calls:
        for at, desk, worker, reply in [each for each in calls if each[0] <= now]:
            await desk.settle(worker, reply, ago_s=now - at)
        calls = [each for each in calls if each[0] > now]
        for desk, worker in desks:
            for reply in (await desk.take(worker, limit=5)).replies:
                answered = now + chance.choice((0.0, 0.2, 1.3))
                arrivals.append((chance.uniform(now, answered), reply.recipient))
                calls.append((answered, desk, worker, reply))
        trial.clock.advance(step_s)
        now += step_s
        expect(now < 200, f"only {len(arrivals)} of {total} went out in {now} s")
    _expect_below([at for at, _ in arrivals], *bot)
    for name in {name for _, name in arrivals}:
        _expect_below([at for at, each in arrivals if each == name], *chat)
    # Full use would be 7 in 10 s; a call counts while it is under way, and steps are coarse.
    expect(now <= total / bot[0] * (bot[1] + 1.3 + 2 * step_s), f"it took {now} s")


def _expect_below(arrivals: list[float], count: int, per_s: float) -> None:
    arrivals = sorted(arrivals)
    for first, last in zip(arrivals, arrivals[count:], strict=False):
        expect(last - first >= per_s - 1e-6, f"{count + 1} calls in {last - first:.3f} s")


async def a_long_line_costs_no_more(trial: DeliveryTrial) -> None:
    """Many of one conversation, and as many conversations: a take is as quick as with a few."""
    worker = await trial.worker()
    places = {"few": lambda n: f"chat {n}", "one": lambda n: "ann", "each": lambda n: f"chat {n}"}
    trial.limits = dict.fromkeys(places, trial.limits[CHANNEL])
    for channel, place in places.items():
        await _put_many(trial, channel, place, FEW if channel == "few" else MANY)
    took = {channel: await _quickest(trial, worker, channel) for channel in places}
    slowest = 5 * took["few"] + SLACK_S
    expect(max(took.values()) < slowest, f"seconds for a take: {took}")


async def _put_many(
    trial: DeliveryTrial, channel: str, place: Callable[[int], str], many: int
) -> None:
    for begin in range(0, many, BATCH):
        await trial.queue.put(
            [
                New(
                    id=f"{channel} {n}",
                    tenant_id="acme",
                    channel=channel,
                    recipient=place(n),
                    content="x" * 200,
                )
                for n in range(begin, min(many, begin + BATCH))
            ]
        )


async def _quickest(trial: DeliveryTrial, worker: Worker, channel: str) -> float:
    """The best of some takes: a busy machine makes any of them slow."""
    took: list[float] = []
    for _ in range(20):
        begun = time.perf_counter()
        queue = {channel: trial.limits[channel]}
        taken = await trial.queue.take(queue, limit=10, worker=worker)
        took.append(time.perf_counter() - begun)
        expect(bool(taken.replies), f"{channel}: nothing was taken")
        await trial.settle(worker, *taken.replies)
    return min(took)
