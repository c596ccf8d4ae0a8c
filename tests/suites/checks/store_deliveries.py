"""Checks of a queue of replies: order, retries, parts, doubt, expiry, and who may settle what."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ackbone.core import events
from ackbone.core.errors import StoreUnavailable
from ackbone.core.outbound.delivery import DIRECT, SCHEDULED, Failed, Held, Outbound, Sent
from ackbone.core.outcome import Dead, Done, Outcome, Park, Rejected, Released, Retry
from ackbone.core.store import Reply, Worker
from ackbone.testing.harness import expect, fail
from tests.suites.delivery_harness import CHANNEL, DeliveryTrial, names

# -- order ----------------------------------------------------------------------------------------


async def a_conversation_goes_one_by_one(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a", "b", "c")
    await trial.put("d")
    for name in "abcd":
        reply = await trial.one(worker)
        expect(reply.id == name, f"{reply.id} before {name}")
        expect(reply.content == f"text of {name}", f"{reply}")
        expect((reply.call, reply.retry_count, reply.in_doubt) == (1, 0, False), f"{reply}")
        expect(await trial.none(worker) is None, "the next is due when this one has ended")
        await trial.settle(worker, reply)
    expect(await trial.none(worker) is None, "nothing is left")
    expect(trial.told_ids(events.DELIVERY_SENT) == list("abcd"), f"{trial.events}")


async def conversations_go_side_by_side(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a")
    await trial.put("b", recipient="bob")
    await trial.put("c", conversation="another")
    await trial.put("d", tenant_id="other")
    await trial.put("e", conversation="another")
    taken = await trial.take(worker)
    expect(names(taken) == list("abcd"), f"{names(taken)}")


async def the_urgent_go_first(trial: DeliveryTrial) -> None:
    """A direct answer overtakes what a timer made, in the same conversation, too."""
    worker = await trial.worker()
    await trial.put("slow", "slower", priority=SCHEDULED)
    await trial.put("slow bob", priority=SCHEDULED, recipient="bob")
    await trial.put("quick", "next", priority=DIRECT)
    first = await trial.take(worker, limit=1)
    expect(names(first) == ["quick"] and first.next_s == 0, f"{names(first)}, {first.next_s}")
    second = await trial.take(worker)
    expect(names(second) == ["slow", "slow bob"], f"{names(second)}")


async def a_limit_leaves_the_rest(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    for n in range(7):
        await trial.put(f"r{n}", recipient=f"chat {n}")
    seen: list[str] = []
    while True:
        taken = await trial.take(worker, limit=3)
        seen += names(taken)
        if taken.next_s != 0:
            break
    expect(seen == [f"r{n}" for n in range(7)], f"{seen}")


async def channels_take_turns(trial: DeliveryTrial) -> None:
    """One that has much to send does not keep the others waiting."""
    worker = await trial.worker()
    trial.limits = {"busy": trial.limits[CHANNEL], "calm": trial.limits[CHANNEL]}
    for n in range(20):
        await trial.put(f"b{n}", recipient=f"chat {n}", channel="busy")
    await trial.put("calm", channel="calm")
    await trial.put("elsewhere", channel="elsewhere")
    seen: list[str] = []
    for _ in range(2):
        seen += names(await trial.take(worker, limit=2))
    expect("calm" in seen and "elsewhere" not in seen, f"{seen}")


# -- ends of an attempt ---------------------------------------------------------------------------


async def a_retry_waits_and_holds_its_conversation(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a", "b")
    await trial.again(worker, await trial.one(worker), 5.0)
    next_s = await trial.none(worker)
    expect(next_s is not None and 4.9 <= next_s <= 5.0, f"due in 5 s, not {next_s}")
    trial.clock.advance(5)
    reply = await trial.one(worker)
    expect((reply.id, reply.call, reply.retry_count) == ("a", 2, 1), f"{reply}")
    await trial.again(worker, reply, 1.0, costs=False)
    trial.clock.advance(1)
    reply = await trial.one(worker)
    expect((reply.id, reply.call, reply.retry_count) == ("a", 3, 1), f"{reply}")
    (first, second) = trial.told(events.DELIVERY_WAITING)
    expect((first["retry_count"], first["wait_s"], first["costs"]) == (1, 5.0, True), f"{first}")
    expect((second["error"], second["costs"]) == ("no luck", False), f"{second}")


async def every_end_lets_the_next_go(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a", "b", "c", "d")
    for result in (Failed(error="never\0" + "x" * 5000), Held(error="who knows"), Sent()):
        await trial.settle(worker, await trial.one(worker), result=result)
    expect((await trial.one(worker)).id == "d", "it is its turn")
    (failed,) = trial.told(events.DELIVERY_FAILED)
    expect(failed["delivery_id"] == "a" and len(failed["error"]) == 1000, f"{failed}")
    (held,) = trial.told(events.DELIVERY_UNKNOWN)
    expect((held["delivery_id"], held["error"]) == ("b", "who knows"), f"{held}")
    trial.clock.advance(1e6)
    expect(await trial.none(worker) is None, "what ended is not sent again")


async def parts_arrive_one_after_the_other(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("long", "next")
    await trial.again(worker, await trial.one(worker), 0.0)
    for part in range(3):
        reply = await trial.one(worker)
        expect(reply.id == "long", f"{reply.id} before all parts were there")
        expect(list(reply.receipts) == [f"n{n}" for n in range(part)], f"{reply.receipts}")
        expect(reply.retry_count == (1 if part == 0 else 0), f"part {part}: {reply.retry_count}")
        await trial.settle(worker, reply, result=Sent(receipt=f"n{part}", more=part < 2))
    parts = [(data["receipt"], data["part"]) for data in trial.told(events.DELIVERY_PART)]
    expect(parts == [("n0", 1), ("n1", 2)], f"{parts}")
    expect(trial.told_ids(events.DELIVERY_SENT) == ["long"], "once")
    expect((await trial.one(worker)).id == "next", "it is its turn")


async def doubt_ends_when_the_part_arrived(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a")
    await trial.again(worker, await trial.one(worker), 0.0, in_doubt=True)
    reply = await trial.one(worker)
    expect(reply.in_doubt, "it may have arrived")
    await trial.again(worker, reply, 0.0)
    reply = await trial.one(worker)
    expect(reply.in_doubt, "the first attempt may still have")
    await trial.settle(worker, reply, result=Sent(more=True))
    expect(not (await trial.one(worker)).in_doubt, "the next part was never sent")
    expect(trial.told_ids(events.DELIVERY_RESENT) == ["a"], "the second attempt sent nothing")


async def what_expired_is_not_sent(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a", "b", expires_s=10.0)
    await trial.put("c")
    await trial.put("in time", recipient="bob", expires_s=10.0)
    trial.clock.advance(9)
    taken = await trial.take(worker)
    expect(names(taken) == ["a", "in time"], f"{names(taken)}")
    await trial.again(worker, taken.replies[0], 5.0)
    trial.clock.advance(5)
    trial.store.expiry_paused = True
    await trial.again(worker, await trial.one(worker), 0.0)
    trial.store.expiry_paused = False
    expect((await trial.one(worker)).id == "c", "the others of its conversation are over")
    expect(trial.told_ids(events.DELIVERY_FAILED) == ["a", "b"], f"{trial.events}")


async def a_channel_is_told_how_urgent_it_is_and_until_when(trial: DeliveryTrial) -> None:
    """One that hands it on to somebody else hands that on, too."""
    worker = await trial.worker()
    await trial.put("a", priority=DIRECT + 1, expires_s=10.0)
    await trial.put("b", recipient="bob")
    urgent, usual = (await trial.take(worker)).replies
    expect((urgent.priority, usual.priority) == (DIRECT + 1, DIRECT), f"{urgent}, {usual}")
    expires_us = urgent.expires_us
    expect(expires_us is not None and usual.expires_us is None, f"{urgent}, {usual}")
    expect(expires_us == urgent.made_us + 10_000_000, f"{urgent}")


# -- whose it is ----------------------------------------------------------------------------------


async def the_dead_lose_what_they_were_sending(trial: DeliveryTrial) -> None:
    dead, worker = await trial.worker(), await trial.worker()
    await trial.put("a", "b")
    lost = await trial.one(dead)
    expect(await trial.queue.recover(worker=worker) == 0, "it is alive")
    expect(await trial.queue.recover(worker=dead) == 0, "it is its own")
    await trial.die(dead)
    await trial.reap(worker)
    expect(await trial.queue.recover(worker=worker) == 1, "it is dead")
    expect(await trial.queue.recover(worker=worker) == 0, "once")
    (told,) = trial.told(events.DELIVERY_RECLAIMED)
    expect((told["delivery_id"], told["channel"]) == ("a", CHANNEL), f"{told}")
    expect("died" in told["error"], f"{told}")
    await trial.settle(dead, lost)
    reply = await trial.one(worker)
    expect((reply.id, reply.call, reply.in_doubt) == ("a", 2, True), f"{reply}")
    await trial.settle(dead, lost)
    await trial.settle(worker, lost)
    expect(not trial.told(events.DELIVERY_SENT), "an old call settles nothing")
    expect(await trial.none(worker) is None, "it is still under way")
    await trial.settle(worker, reply)
    await trial.settle(worker, reply, result=Failed(error="too late"))
    expect(trial.told_ids(events.DELIVERY_SENT) == ["a"], f"{trial.events}")
    expect(not trial.told(events.DELIVERY_FAILED), "it has ended")
    expect(trial.told_ids(events.DELIVERY_RESENT) == ["a"], "that is told")


async def one_that_is_leaving_ends_what_it_was_sending(trial: DeliveryTrial) -> None:
    """Another one that took it over would send it twice."""
    leaving, worker = await trial.worker(), await trial.worker()
    await trial.put("a", "b")
    reply = await trial.one(leaving)
    await trial.store.leave(leaving, running=True)
    expect(await trial.queue.recover(worker=worker) == 0, "it is still there")
    expect(await trial.none(worker) is None, "it is under way")
    await trial.settle(leaving, reply)
    expect(trial.told_ids(events.DELIVERY_SENT) == ["a"], f"{trial.events}")
    lost = await trial.one(leaving)
    await trial.store.leave(leaving)
    expect(await trial.queue.recover(worker=worker) == 1, "now it is gone")
    reply = await trial.one(worker)
    expect((reply.id, reply.call, reply.in_doubt) == ("b", 2, True), f"{lost}, {reply}")


async def who_left_or_died_takes_nothing(trial: DeliveryTrial) -> None:
    left, dead, worker = [await trial.worker() for _ in range(3)]
    await trial.put("a")
    await trial.store.leave(left)
    await trial.die(dead)
    await trial.reap(worker)
    for gone in (left, dead):
        try:
            await trial.take(gone)
        except StoreUnavailable:
            continue
        fail("what it took, another would have got at once")
    await trial.one(worker)


async def a_reply_is_put_once(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    await trial.put("a", "b")
    await trial.put("b", "a", "c")
    seen = []
    for _ in range(3):
        reply = await trial.one(worker)
        seen.append(reply.id)
        await trial.settle(worker, reply)
    await trial.put("a", "b", "c")
    expect(seen == ["a", "b", "c"], f"{seen}")
    expect(await trial.none(worker) is None, "they were sent")


async def replies_come_as_they_are(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    url = "https://example.org/" + "x" * 2000
    wanted: list[dict[str, Any]] = [
        {"recipient": url, "content": "hi", "options": {"buttons": ["yes"]}},
        {"recipient": "ann", "content": "ho", "conversation": "k", "expires_s": 5.0},
    ]
    runs = trial.runs()
    replies = [Reply(channel=CHANNEL, **fields) for fields in wanted]
    await runs.committed(worker, await runs.run(worker, "m"), Done(), replies=replies)
    first, second = (await trial.take(worker)).replies
    expect((first.recipient, first.content, first.task_id) == (url, "hi", "m"), f"{first}")
    expect(dict(first.options) == {"buttons": ["yes"]}, f"{first}")
    expect((second.conversation, dict(second.options)) == ("k", {}), f"{second}")
    await trial.again(worker, second, 6.0)
    trial.clock.advance(6)
    await trial.none(worker)
    (failed,) = [event for event in trial.events if event.type == events.DELIVERY_FAILED]
    expect((failed.subscription, failed.task_id) == ("s", "m"), f"{failed}")


async def a_second_process_sends(trial: DeliveryTrial) -> None:
    """Two that did not know of each other would send everything twice."""
    await trial.put("a")
    other = await trial.another()
    await other.one(await other.worker())
    expect(await trial.none(await trial.worker()) is None, "the other sends it")


async def a_reply_is_told_when_it_is_made(trial: DeliveryTrial) -> None:
    worker = await trial.worker()
    runs = trial.runs()
    run = await runs.run(worker, "m")
    reply = Reply(channel=CHANNEL, recipient="ann", content="hi")
    now = Reply(channel=CHANNEL, recipient="bob", content="at once", now=True)
    first = await runs.store.reply_now(run, now, 0)
    await runs.store.reply_now(run, now, 0)
    expect(trial.told_ids(events.DELIVERY_CREATED) == [first], "once, however often it is written")
    await runs.committed(worker, run, Done(), replies=[reply, reply])
    await runs.finish(worker, (run, Done()), replies=[reply, reply])
    made = [event for event in trial.events if event.type == events.DELIVERY_CREATED]
    expect(len({event.data["delivery_id"] for event in made}) == 3 == len(made), f"{made}")
    expect({(e.subscription, e.task_id) for e in made} == {("s", "m")}, f"{made}")
    expect(made[0].data["channel"] == CHANNEL, f"{made}")
    taken = await trial.take(worker)
    expect(len(trial.told(events.DELIVERY_CREATED)) == 3, "taking makes nothing")
    await trial.settle(worker, *taken.replies)
    await trial.settle(worker, await trial.one(worker))
    plain = await runs.run(worker, "without")
    before = len(trial.events)
    await runs.committed(worker, plain, Done())
    expect(len(trial.events) == before + 1, "a run without replies has its end, and no more")


async def only_a_success_sends_its_replies(trial: DeliveryTrial) -> None:
    """What failed, waits or runs again has answered nobody."""
    worker = await trial.worker()
    runs = trial.runs()
    reply = Reply(channel=CHANNEL, recipient="ann", content="hi")
    ends: list[Outcome] = [
        Retry(60.0, "again"),
        Dead(reason="r"),
        Park("k", "r"),
        Rejected(reason="r"),
        Released(after_s=60.0),
    ]
    for n, outcome in enumerate(ends):
        run = await runs.run(worker, f"m{n}")
        await runs.committed(worker, run, outcome, replies=[reply])
    expect(await trial.none(worker) is None, "nothing is to be sent, now or later")
    expect(not trial.told(events.DELIVERY_CREATED), f"{trial.events}")


async def what_no_run_made_is_told_when_it_is_first_taken(trial: DeliveryTrial) -> None:
    """Whoever put it in need not have a number in the ledger."""
    worker = await trial.worker()
    await trial.put("a", "b", "c")
    await trial.put("a")
    expect(not trial.told(events.DELIVERY_CREATED), "nobody took them")
    head = await trial.one(worker)
    expect(trial.told_ids(events.DELIVERY_CREATED) == ["a"], f"{trial.events}")
    found = await trial.queue.follow(head, lambda _: True, limit=1, worker=worker)
    expect(trial.told_ids(events.DELIVERY_CREATED) == ["a", "b"], f"{names(found)}")
    for reply in (head, *found):
        await trial.again(worker, reply, 0.0)
    for name in "abc":
        reply = await trial.one(worker)
        expect(reply.id == name, f"{reply}")
        await trial.settle(worker, reply)
    expect(trial.told_ids(events.DELIVERY_CREATED) == ["a", "b", "c"], f"{trial.events}")


async def bells_ring_for_what_is_due(trial: DeliveryTrial) -> None:
    worker, dead = await trial.worker(), await trial.worker()
    bell = trial.queue.subscribe()

    async def rung(why: str) -> None:
        try:
            async with asyncio.timeout(10):
                await bell.wait()
        except TimeoutError:
            fail(f"no bell: {why}")
        bell.clear()

    await trial.put("a", "b", "c")
    await rung("a reply was put in")
    await trial.settle(worker, await trial.one(worker))
    await rung("it is the next one's turn")
    await trial.again(worker, await trial.one(worker), 0.0)
    await rung("it is due again at once")
    await trial.one(dead)
    await trial.die(dead)
    await trial.reap(worker)
    await trial.queue.recover(worker=worker)
    await rung("its sender died")
    trial.queue.unsubscribe(bell)


async def two_takers_share_the_work(trial: DeliveryTrial) -> None:
    """Two processes at once: no reply goes out twice, no conversation has two under way."""
    other = await trial.another()
    both = [(trial, await trial.worker()), (other, await other.worker())]
    wanted: dict[str, list[str]] = {}
    for n in range(60):
        lane = f"chat {n % 8}"
        wanted.setdefault(lane, []).append(f"r{n:02}")
        await trial.put(f"r{n:02}", recipient=lane)
    sent: list[Outbound] = []

    async def work(desk: DeliveryTrial, worker: Worker) -> None:
        while len(sent) < 60:
            taken = await desk.take(worker, limit=3)
            lanes = Counter(reply.recipient for reply in [*taken.replies, *under_way.values()])
            expect(max(lanes.values(), default=0) <= 1, f"two of a conversation: {lanes}")
            under_way.update({reply.id: reply for reply in taken.replies})
            await asyncio.sleep(0)
            sent.extend(taken.replies)
            for reply in taken.replies:
                del under_way[reply.id]
            await desk.settle(worker, *taken.replies)

    under_way: dict[str, Outbound] = {}
    await asyncio.wait_for(asyncio.gather(*(work(*each) for each in both)), 60)
    got: dict[str, list[str]] = {}
    for reply in sent:
        got.setdefault(reply.recipient, []).append(reply.id)
    expect(got == wanted, f"{got}")


async def what_is_taken_says_when_it_was_made(trial: DeliveryTrial) -> None:
    """Whoever asks a channel whether it arrived need not look further back."""
    worker = await trial.worker()
    before = trial.clock.now_us()
    await trial.put("a", "b")
    trial.clock.advance(3600)
    first = await trial.one(worker)
    expect(0 <= first.made_us - before < 3_000_000_000, f"{first.made_us - before} µs later")
    (second,) = await trial.queue.follow(first, lambda replies: True, limit=1, worker=worker)
    expect(second.made_us >= first.made_us, f"{second.made_us} after {first.made_us}")
