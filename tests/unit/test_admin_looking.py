"""Looking on: the life of a message, queues, figures, and the ledger as it grows."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from ackbone import Context
from ackbone.admin.queues import list_queues, pause, resume
from ackbone.admin.stats import stats
from ackbone.admin.tail import EventFilter, follow
from ackbone.admin.trace import trace
from ackbone.core.errors import Ambiguous, NotFound
from ackbone.core.records import LedgerEvent, Records
from tests.unit.desk import Desk, open_desk


@pytest.fixture
async def desk(home: Path) -> AsyncIterator[Desk]:
    async with open_desk(home) as desk:
        yield desk


# ── trace ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_trace_runs_from_sent_to_the_reply(desk: Desk):
    async def answer(ctx: Context) -> None:
        await ctx.once("look", lambda: {"found": 1})
        await ctx.send("good", {"n": 1})
        await ctx.reply("hello")

    desk.app.on("ask")(answer)
    receipt = await desk.app.send("ask", {}, idempotency_key="key-1")
    await desk.work()
    found = await trace(desk.records, receipt.id)
    assert found.status == "succeeded"
    kinds = [moment.what for moment in found.timeline]
    assert kinds == [
        "message.sent", "task.claimed", "effect.begun", "effect.done", "task.succeeded",
        "delivery.created",
    ]  # fmt: skip
    assert [moment.at_us for moment in found.timeline] == sorted(m.at_us for m in found.timeline)
    assert [reply.content for reply in found.replies] == ["hello"]
    assert [(effect.name, effect.state) for effect in found.effects] == [("look", "done")]
    (link,) = found.links
    assert (link.relation, link.type, link.status) == ("follow-up", "good", "succeeded")


async def test_a_message_that_waits_is_traced_too(desk: Desk):
    await desk.app.send("good", {}, id="later-1", delay_s=3600, correlation_id="corr-9")
    for name in ("later-1", "later", "corr-9"):
        found = await trace(desk.records, name)
        assert (found.message_id, found.status) == ("later-1", "delayed")
        assert [moment.what for moment in found.timeline] == ["message.sent"]


async def test_a_message_is_found_by_everything_that_names_it(desk: Desk):
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    await desk.app.send(
        "good", {}, id="m-one", correlation_id="corr-1", idempotency_key="key-1", trace=parent
    )
    await desk.app.send("good", {"mentions": "corr-1"}, id="m-two")
    for names_it in (False, True):
        for name in ("m-one", "m-on", "corr-1", "key-1", "ab" * 16):
            found = await trace(desk.records, name)
            assert found.message_id == "m-one", (name, names_it)
        await desk.work()
    assert (await trace(desk.records, "queue-m-two")).message_id == "m-two"
    await desk.app.send("good", {}, id="m-onerous")
    with pytest.raises(Ambiguous) as caught:
        await trace(desk.records, "m-on")
    assert len(caught.value.matches) == 2
    assert (await trace(desk.records, "m-one")).message_id == "m-one", "an exact id comes first"


async def test_replays_are_linked_both_ways(desk: Desk):
    await desk.app.send("bad", {}, id="old-1")
    await desk.work()
    (handled,) = await desk.replayed([await desk.letters.find("old-1")])
    new_id = handled.replay_id or ""
    old = await trace(desk.records, "old-1")
    assert [(link.relation, link.message_id) for link in old.links] == [("replayed as", new_id)]
    assert old.links[0].status == "waiting"
    await desk.work()
    new = await trace(desk.records, new_id)
    assert ("replay of", "old-1") in [(link.relation, link.message_id) for link in new.links]
    assert [moment.what for moment in old.timeline][-1] == "dlq.replayed"


async def test_a_dead_letters_id_names_its_message(desk: Desk):
    await desk.app.send("bad", {}, id="old-1")
    await desk.work()
    letter = await desk.letters.find("old-1")
    for name in (letter.id, letter.id[:-1]):
        found = await trace(desk.records, name)
        assert (found.message_id, found.tenant_id) == ("old-1", "default")
    with pytest.raises(NotFound):
        await trace(desk.records, letter.id, tenant_id="nobody")


async def test_one_tenants_message_is_not_anothers(desk: Desk):
    for tenant in ("acme", "zeta"):
        await desk.app.send("good", {}, id="same-id", tenant_id=tenant)
    await desk.work()
    with pytest.raises(Ambiguous) as caught:
        await trace(desk.records, "same-id")
    assert len(caught.value.matches) == 2
    found = await trace(desk.records, "same-id", tenant_id="acme")
    assert found.tenant_id == "acme"
    with pytest.raises(NotFound):
        await trace(desk.records, "same-id", tenant_id="nobody")


async def test_an_unknown_name_is_not_found(desk: Desk):
    for name in ("no-such-message", "%", "_", "'", "x" * 300, "\x1b[31m"):
        with pytest.raises(NotFound):
            await trace(desk.records, name)


# ── queues and figures ───────────────────────────────────────────────────────────────────────────


async def test_queues_show_what_stands_where(desk: Desk):
    await desk.app.send("good", {}, id="done")
    await desk.app.send("bad", {}, id="dead")
    await desk.app.send("unknown", {}, id="parked")
    await desk.work()
    await desk.app.send("good", {})
    await desk.app.send("good", {}, delay_s=3600)
    await desk.app.send("good", {}, queue="other", ttl_s=3600)
    (default, other, quiet), _ = await list_queues(desk.records, ["quiet"])
    assert (default.ready, default.delayed, default.parked, default.dead) == (1, 1, 1, 1)
    assert default.running == default.waiting == 0
    assert default.oldest_age_s is not None
    assert default.oldest_age_s < 60
    assert (other.queue, other.ready) == ("other", 1)
    assert (quiet.queue, quiet.ready, quiet.oldest_age_s) == ("quiet", 0, None)


async def test_a_paused_queue_is_left_alone_until_it_is_resumed(desk: Desk):
    await desk.app.send("good", {"n": 1})
    with pytest.raises(NotFound, match="did you mean 'default'"):
        await pause(desk.records, desk.operations, "defualt")
    assert await pause(desk.records, desk.operations, "default")
    assert not await pause(desk.records, desk.operations, "default")
    assert await desk.app.store.paused() == {"default"}
    worker = desk.app.worker()
    await worker.begin()
    await desk.app.send("good", {"n": 2}, queue="other")
    await desk.has_seen({"n": 2})
    assert await resume(desk.records, desk.operations, "default")
    assert not await resume(desk.records, desk.operations, "default")
    await desk.has_seen({"n": 2}, {"n": 1})
    await worker.drain()
    acts = await desk.records.events_of("default", "")
    assert [event.type for event in acts] == ["queue.paused", "queue.resumed"]


async def test_stats_count_and_rate(desk: Desk):
    for n in range(6):
        await desk.app.send("good", {"n": n})
    await desk.app.send("bad", {})
    await desk.work()
    found = await stats(desk.records, desk.app.clock, window_s=60)
    assert found.statuses["default"] == {"failed": 1, "succeeded": 6}
    assert found.rates["default"]["succeeded"] == 6.0
    assert found.rates["default"]["failed"] == 1.0
    assert [worker.alive for worker in found.workers] == [True], "this desk's own number"
    none = await desk.records.event_counts(time.time_ns() // 1000 + 60_000_000)
    assert none == []


async def test_rates_count_from_the_right_event_on(desk: Desk):
    """The search by halving, against a plain count."""
    times = []
    for n in range(40):
        await desk.app.send("good", {"n": n})
        await desk.work()
        times.append(time.time_ns() // 1000)
    everything = await desk.records.events_after(0, limit=1000)
    for since in (0, *times):
        counted = sum(each.count for each in await desk.records.event_counts(since))
        assert counted == sum(event.at_us >= since for event in everything)


# ── tail ─────────────────────────────────────────────────────────────────────────────────────────


async def test_tail_shows_what_was_and_what_comes(desk: Desk):
    await desk.app.send("good", {}, id="first")
    await desk.work()
    where = EventFilter(types=("task.succ*",), queues=("default",))
    following = follow(desk.records, where, position=0)
    assert (await anext(following)).task_id == "first"
    coming = asyncio.ensure_future(anext(following))
    await desk.app.send("good", {}, id="second")
    await desk.work()
    assert (await asyncio.wait_for(coming, 30)).task_id == "second"
    await following.aclose()


async def test_tail_ends_at_the_end_if_asked_to(desk: Desk):
    for n in range(3):
        await desk.app.send("good", {}, id=f"m-{n}", tenant_id="acme" if n else "zeta")
    await desk.work()
    where = EventFilter(tenant_id="acme")
    shown = [e async for e in follow(desk.records, where, position=0, forever=False)]
    assert {event.task_id for event in shown} == {"m-1", "m-2"}
    start = await desk.records.last_position(back=2)
    assert (
        len([e async for e in follow(desk.records, EventFilter(), position=start, forever=False)])
        == 2
    )


async def test_a_tail_that_is_stopped_at_the_moment_of_a_wake_up_stops(
    monkeypatch: pytest.MonkeyPatch,
):
    # Before Python 3.12 `asyncio.wait_for` drops a cancellation that meets its result.
    class Quiet:
        def __init__(self) -> None:
            self.bell = asyncio.Event()
            self.asked = asyncio.Event()

        def subscribe(self) -> asyncio.Event:
            return self.bell

        def unsubscribe(self, event: asyncio.Event) -> None: ...

        async def events_after(self, position: int, **_: object) -> list[LedgerEvent]:
            self.asked.set()
            return []

    monkeypatch.setattr("ackbone.admin.tail.NET_S", 3600.0)
    records = Quiet()
    following = follow(cast(Records, records), EventFilter(), position=0)
    watching = asyncio.ensure_future(anext(following))
    await records.asked.wait()
    for _ in range(3):
        await asyncio.sleep(0)  # until it waits for the bell
    records.bell.set()
    await asyncio.sleep(0)  # its wait is over, and it has not noticed yet
    watching.cancel()
    await asyncio.wait({watching}, timeout=5)
    stopped = watching.cancelled()
    watching.cancel()
    assert stopped
