"""Checks of a queue of replies: what operators see, and what they do."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from ackbone.core import events
from ackbone.core.errors import Conflict, NotFound
from ackbone.core.outbound.delivery import Failed, Held, Sent
from ackbone.core.outbound.delivery_records import (
    DeliveryActs,
    DeliveryFilter,
    DeliveryRecord,
    DeliveryRecords,
)
from ackbone.core.records import Records
from ackbone.testing.harness import expect, fail
from tests.suites.delivery_harness import CHANNEL, DeliveryTrial, names


class Looking(DeliveryRecords, Records, Protocol):
    """The ledger, too."""


class Desk:
    """Where operators sit."""

    def __init__(self, acts: DeliveryActs, records: Looking) -> None:
        self.acts = acts
        self.records = records

    async def told(self) -> list[Mapping[str, Any]]:
        """The events of the ledger, the first one first, each as its data and its `type`."""
        found = await self.records.events_after(0, limit=100)
        return [{"type": event.type, **event.data} for event in found]

    async def one(self, name: str) -> DeliveryRecord:
        (found,) = await self.records.deliveries_named(name, tenant_id=None)
        return found

    async def status(self, name: str) -> str:
        return (await self.one(name)).status


async def _refused(act: Awaitable[Any], kind: type[Exception]) -> None:
    try:
        await act
    except kind:
        return
    fail(f"it was done, without a {kind.__name__}")


async def replies_are_found(trial: DeliveryTrial, desk: Desk) -> None:
    worker = await trial.worker()
    await trial.put("abc-1", "abc-2")
    trial.clock.advance(10)
    await trial.put("xyz", tenant_id="other", channel="elsewhere", options={"a": 1})
    reply = await trial.one(worker)
    await trial.settle(worker, reply, result=Failed(error="no such chat"))
    records = desk.records

    async def ids(**where: Any) -> list[str]:
        found = await records.deliveries(DeliveryFilter(**where), limit=10)
        return [each.id for each in found]

    expect(await ids() == ["xyz", "abc-2", "abc-1"], "newest first")
    expect(await ids(status="failed") == ["abc-1"], "by status")
    expect(await ids(channel="elsewhere") == ["xyz"], "by channel")
    expect(await ids(tenant_id="acme") == ["abc-2", "abc-1"], "by tenant")
    expect(await ids(since_us=trial.clock.now_us()) == ["xyz"], "by time")
    oldest = await records.delivery_ids(DeliveryFilter(), limit=2)
    expect(list(oldest) == ["abc-1", "abc-2"], f"oldest first: {oldest}")
    begins = await records.deliveries_named("abc", tenant_id="acme")
    expect([each.id for each in begins] == ["abc-1", "abc-2"], f"{begins}")
    expect(not await records.deliveries_named("abc", tenant_id="other"), "another tenant's")
    failed = await desk.one("abc-1")
    expect((failed.last_error, failed.calls) == ("no such chat", 1), f"{failed}")
    expect(failed.content == "text of abc-1", "it keeps its content")
    expect((await desk.one("xy")).options == {"a": 1}, "by its beginning, whole")


async def a_retry_begins_anew(trial: DeliveryTrial, desk: Desk) -> None:
    worker = await trial.worker()
    await trial.put("a", expires_s=60.0)
    await trial.put("b", "c", recipient="bob")
    trial.clock.advance(61)
    first = await trial.one(worker)
    await trial.again(worker, first, 600.0)
    answers = await desk.acts.retry_deliveries(["a", "b", "nobody"])
    expect(answers[:2] == [None, None], f"{answers}")
    expect(isinstance(answers[2], NotFound), f"{answers}")
    failed = await desk.one("a")
    expect((failed.status, failed.retry_count, failed.expires_at_us) == ("pending", 0, None), "a")
    expect(failed.last_error is not None, "it keeps what was wrong")
    taken = await trial.take(worker)
    expect(sorted(names(taken)) == ["a", "b"], f"{names(taken)}")
    expect([reply.retry_count for reply in taken.replies] == [0, 0], "all its attempts")
    (busy, waits) = await desk.acts.retry_deliveries(["a", "c"])
    expect(isinstance(busy, Conflict) and isinstance(waits, Conflict), f"{busy} {waits}")


async def what_is_unknown_waits_for_a_person(trial: DeliveryTrial, desk: Desk) -> None:
    worker = await trial.worker()
    await trial.put("a")
    await trial.settle(worker, await trial.one(worker), result=Held(error="no answer"))
    expect(await desk.status("a") == "unknown", "nobody knows")
    await desk.acts.retry_deliveries(["a"])
    expect((await trial.one(worker)).in_doubt, "it may be there already")


async def a_person_agrees_to_one_repeat(trial: DeliveryTrial, desk: Desk) -> None:
    worker, dead = await trial.worker(), await trial.worker()
    await trial.put("a")
    first = await trial.one(worker)
    expect(not first.repeat_agreed, "nobody was asked")
    await trial.settle(worker, first, result=Held(error="no answer"))
    await desk.acts.retry_deliveries(["a"])
    reply = await trial.one(worker)
    expect(reply.in_doubt and reply.repeat_agreed, f"a person wants it sent: {reply}")
    await trial.again(worker, reply, 0.0)
    reply = await trial.one(worker)
    expect(reply.repeat_agreed, "nothing was sent: the word still holds")
    await trial.again(worker, reply, 600.0)
    await desk.acts.retry_deliveries(["a"])
    reply = await trial.one(worker)
    expect(reply.repeat_agreed, "to be told twice changes nothing")
    await trial.again(worker, reply, 0.0, in_doubt=True)
    reply = await trial.one(worker)
    expect(reply.in_doubt and not reply.repeat_agreed, f"it was for one repeat: {reply}")
    await trial.settle(worker, reply, result=Held(error="no answer"))
    await desk.acts.retry_deliveries(["a"])
    expect((await trial.one(dead)).repeat_agreed, "once more")
    await trial.die(dead)
    await trial.reap(worker)
    await trial.queue.recover(worker=worker)
    reply = await trial.one(worker)
    expect(reply.in_doubt and not reply.repeat_agreed, f"that one may have arrived: {reply}")
    await trial.again(worker, reply, 600.0)
    await desk.acts.retry_deliveries(["a"])
    expect(not (await trial.one(worker)).repeat_agreed, "it waited, and was not unknown")


async def repeats_are_counted_when_they_may_have_gone_out(trial: DeliveryTrial, desk: Desk) -> None:
    worker = await trial.worker()

    async def in_doubt(name: str) -> None:
        await trial.put(name, recipient=name)
        await trial.again(worker, await trial.one(worker), 0.0, in_doubt=True)

    async def counted(name: str, number: int) -> None:
        resent = (await desk.one(name)).resent
        told = trial.told_ids(events.DELIVERY_RESENT).count(name)
        expect((resent, told) == (number, number), f"{name}: {resent} counted, {told} told")

    await in_doubt("refused")
    for _ in range(3):
        await trial.again(worker, await trial.one(worker), 0.0)
    await counted("refused", 0)
    await trial.settle(worker, await trial.one(worker))
    await counted("refused", 1)
    kinds = [event.type for event in trial.events][-2:]
    expect(kinds == [events.DELIVERY_RESENT, events.DELIVERY_SENT], f"{kinds}")
    for name, result, number in (
        ("seen", Sent(seen=True), 0),
        ("final", Failed(error="no such chat"), 0),
        ("given up", Failed(error="no answer", in_doubt=True), 1),
        ("held back", Held(error="in doubt", called=False), 0),
        ("held", Held(error="no answer"), 1),
        ("part", Sent(more=True), 1),
    ):
        await in_doubt(name)
        await trial.settle(worker, await trial.one(worker), result=result)
        await counted(name, number)
    await trial.settle(worker, await trial.one(worker))
    await counted("part", 1)
    await trial.put("fresh", recipient="fresh")
    await trial.settle(worker, await trial.one(worker), result=Failed(error="?", in_doubt=True))
    expect((await desk.one("fresh")).in_doubt, "it may have arrived by its last attempt")
    await desk.acts.retry_deliveries(["fresh"])
    await trial.settle(worker, await trial.one(worker))
    await counted("fresh", 1)


async def a_repeat_is_counted_though_its_sender_died(trial: DeliveryTrial, desk: Desk) -> None:
    dead, late, worker = await trial.worker(), await trial.worker(), await trial.worker()
    await trial.put("a")
    first = await trial.one(dead)
    await trial.die(dead)
    await trial.reap(worker)
    await trial.queue.recover(worker=worker)
    expect((await desk.one("a")).resent == 0, "it went out once")
    repeat = await trial.one(late)
    await trial.die(late)
    await trial.reap(worker)
    await trial.settle(dead, first)
    await trial.queue.recover(worker=worker)
    await trial.settle(late, repeat)
    expect((await desk.one("a")).resent == 1, "the second call may have gone out, too")
    expect(trial.told_ids(events.DELIVERY_RESENT) == ["a"], f"{trial.events}")
    await trial.settle(worker, await trial.one(worker))
    expect((await desk.one("a")).resent == 2, "and the third")
    expect(trial.told_ids(events.DELIVERY_RESENT) == ["a", "a"], f"{trial.events}")


async def texts_are_edited(trial: DeliveryTrial, desk: Desk) -> None:
    worker = await trial.worker()
    await trial.put("a", "b")
    await desk.acts.edit_delivery("a", content="better")
    reply = await trial.one(worker)
    expect(reply.content == "better", f"{reply}")
    await _refused(desk.acts.edit_delivery("a", content="late"), Conflict)
    await trial.settle(worker, reply, result=Sent(more=True))
    await _refused(desk.acts.edit_delivery("a", content="a part arrived"), Conflict)
    await _refused(desk.acts.edit_delivery("nobody", content="x"), NotFound)


async def what_is_discarded_lets_the_next_go(trial: DeliveryTrial, desk: Desk) -> None:
    worker = await trial.worker()
    await trial.put("a", "b", "c")
    reply = await trial.one(worker)
    expect(await trial.none(worker) is None, "the others stand in line")
    (busy,) = await desk.acts.discard_deliveries(["a"], reason="no")
    expect(isinstance(busy, Conflict), f"{busy}")
    await trial.again(worker, reply, 600.0)
    expect(list(await desk.acts.discard_deliveries(["a", "b"], reason="no")) == [None, None], "")
    expect((await trial.one(worker)).id == "c", "it is its turn")
    expect([await desk.status(name) for name in "ab"] == ["discarded"] * 2, "they are kept")
    (again,) = await desk.acts.discard_deliveries(["a"], reason="no")
    expect(isinstance(again, Conflict), "once")


async def a_paused_channel_waits(trial: DeliveryTrial, desk: Desk) -> None:
    worker = await trial.worker()
    await trial.put("a")
    expect(await desk.acts.pause_channel(CHANNEL), "it was not paused")
    expect(not await desk.acts.pause_channel(CHANNEL), "it was")
    expect(await desk.records.paused_channels() == {CHANNEL}, "it is to be seen")
    expect(await trial.none(worker) is None, "nothing goes out")
    bell = trial.queue.subscribe()
    expect(await desk.acts.unpause_channel(CHANNEL), "it was paused")
    expect(not await desk.acts.unpause_channel(CHANNEL), "it was not")
    await bell.wait()
    trial.queue.unsubscribe(bell)
    expect((await trial.one(worker)).id == "a", "it goes on")


async def acts_are_told_with_who_did_it(trial: DeliveryTrial, desk: Desk) -> None:
    await trial.put("a")
    await desk.acts.edit_delivery("a", content="better")
    await desk.acts.retry_deliveries(["a"])
    await desk.acts.discard_deliveries(["a"], reason="done")
    await desk.acts.pause_channel(CHANNEL)
    await desk.acts.unpause_channel(CHANNEL)
    found = [event for event in await desk.told() if event["type"].startswith("delivery.")]
    kinds = [event["type"] for event in found]
    expect(
        kinds
        == [
            events.DELIVERY_EDITED,
            events.DELIVERY_RETRIED,
            events.DELIVERY_DISCARDED,
            events.DELIVERY_PAUSED,
            events.DELIVERY_RESUMED,
        ],
        f"{kinds}",
    )
    expect(all(event["by"] == "suite" for event in found), f"{found}")
    expect(found[2]["reason"] == "done", f"{found[2]}")
    expect([event["channel"] for event in found] == [CHANNEL] * 5, f"{found}")
