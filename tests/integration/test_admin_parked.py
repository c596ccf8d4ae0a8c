"""Parked messages: resumed without spending an attempt, discarded once, lanes and keys let go."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ackbone import Context
from ackbone.core.errors import Ambiguous, Conflict, NotFound
from ackbone.core.records import EffectWord, Identity, Resumption
from ackbone.core.store import Run
from tests.servers.stores import STORES, store_url
from tests.unit.desk import Desk, open_desk, until


@pytest.fixture(params=STORES)
async def desk(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[Desk]:
    async with open_desk(home, store=store_url(request)) as desk:
        yield desk


async def park(desk: Desk, message_id: str, **options) -> None:
    """No handler for its type: set aside."""
    await desk.app.send("unknown", options.pop("payload", {}), id=message_id, **options)
    await desk.work()
    assert await desk.status(message_id) == "parked"


async def test_a_parked_message_is_found_with_its_body_and_its_reason(desk: Desk):
    await park(desk, "m-1", payload={"n": 1}, tenant_id="acme")
    ((_, listed),) = await desk.records.parked(limit=9)
    assert (listed.message_id, listed.parked_kind) == ("m-1", "workflow_pending")
    assert listed.body is None, "a list carries no bodies"
    task = await desk.parked.find("m-1")
    message = desk.parked.read(task).message
    assert message is not None
    assert message.payload == {"n": 1}
    assert not await desk.records.parked(queue="other", limit=9)
    assert not await desk.records.parked(kind="effect_unknown", limit=9)
    assert not await desk.records.parked(tenant_id="zeta", limit=9)


async def test_resuming_spends_no_attempt(desk: Desk):
    await park(desk, "m-1")
    before = (await desk.parked.find("m-1")).attempt
    seen: list[int] = []

    async def late(ctx: Context) -> None:
        seen.append(ctx.attempt)

    await desk.parked.resume(await desk.parked.find("m-1"))
    (task,) = await desk.records.tasks(None, "m-1")
    assert (task.status, task.attempt, task.parked_kind) == ("ready", before, None)
    resumed = (await desk.events_of("m-1"))[-1]
    assert resumed.type == "task.resumed"
    assert resumed.data["kind"] == "workflow_pending"
    assert "@" in resumed.data["by"]
    desk.app.on("unknown")(late)
    await desk.work()
    assert seen == [1]
    assert await desk.status("m-1") == "succeeded"


async def test_what_is_not_parked_any_more_is_refused(desk: Desk):
    await park(desk, "m-1")
    task = await desk.parked.find("m-1")
    await desk.parked.discard(task, reason="no use")
    with pytest.raises(Conflict, match="discarded"):
        await desk.parked.resume(task)
    with pytest.raises(Conflict, match="discarded"):
        await desk.parked.discard(task, reason="again")
    with pytest.raises(Conflict, match="it is discarded"):
        await desk.parked.find("m-1")
    with pytest.raises(NotFound):
        await desk.parked.find("nothing-here")
    with pytest.raises(NotFound):
        await desk.operations.resume(
            Identity(tenant_id="default", subscription="default", message_id="x")
        )


async def test_of_many_operators_at_once_one_wins_and_one_final_event_is_written(desk: Desk):
    await park(desk, "m-1")
    task = await desk.parked.find("m-1")
    acts = [
        desk.parked.discard(task, reason=str(n)) if n % 2 else desk.parked.resume(task)
        for n in range(8)
    ]
    answers = await asyncio.gather(*acts, return_exceptions=True)
    assert sum(answer is None for answer in answers) == 1
    assert all(answer is None or isinstance(answer, Conflict) for answer in answers)
    kinds = await desk.events("m-1")
    assert kinds.count("task.discarded") + kinds.count("task.resumed") == 1


async def test_a_discarded_message_frees_its_key_and_its_conversation(desk: Desk):
    await park(desk, "m-1", idempotency_key="key", ordering_key="talk")
    await desk.app.send("good", {"n": 2}, id="m-2", ordering_key="talk")
    await desk.app.send("good", {"n": 3}, id="m-3", idempotency_key="key")
    worker = desk.app.worker()
    await worker.begin()

    async def both_wait() -> bool:
        tasks = [*await desk.records.tasks(None, "m-2"), *await desk.records.tasks(None, "m-3")]
        return [task.status for task in tasks] == ["queued", "waiting_key"]

    await until(both_wait)
    assert desk.seen == []
    await desk.parked.discard(await desk.parked.find("m-1"), reason="no use")
    await desk.has_seen({"n": 2}, {"n": 3})
    await worker.drain()
    final = (await desk.events_of("m-1"))[-1]
    assert final.type == "task.discarded"
    assert final.data["status"] == "discarded"
    assert final.data["reason"] == "no use"


async def test_an_unknown_effect_needs_the_operators_word(desk: Desk):
    charged: list[str] = []

    async def charge(ctx: Context) -> None:
        def effect() -> None:
            charged.append("called")
            raise RuntimeError("the line went dead")

        desk.seen.append(await ctx.once("charge", effect))

    desk.app.on("pay", retries=2)(charge)
    for message_id in ("m-1", "m-2"):
        await desk.app.send("pay", {}, id=message_id)
    await desk.work()
    task = await desk.parked.find("m-1")
    assert task.parked_kind == "effect_unknown"
    assert [(each.name, each.state) for each in await desk.parked.effects(task)] == [
        ("charge", "begun")
    ]
    with pytest.raises(Conflict, match="charge=done"):
        await desk.parked.resume(task)
    wrong = EffectWord(name="chrage", word=Resumption.DONE)
    with pytest.raises(Conflict, match="charge"):
        await desk.parked.resume(task, effects=[wrong])
    assert await desk.status("m-1") == "parked", "a refused word must change nothing"

    done = EffectWord(name="charge", word=Resumption.DONE, value=b'{"receipt": 7}')
    await desk.parked.resume(task, effects=[done])
    not_done = EffectWord(name="charge", word=Resumption.NOT_DONE)
    await desk.parked.resume(await desk.parked.find("m-2"), effects=[not_done])
    calls = len(charged)
    await desk.work()
    assert desk.seen == [{"receipt": 7}], "the recorded result, without a second call"
    assert len(charged) == calls + 1, "not done: called again"
    assert await desk.status("m-1") == "succeeded"
    assert await desk.status("m-2") == "parked"
    assert "effect.cleared" in await desk.events("m-2")


async def test_a_word_on_an_effect_that_is_done_by_now_is_no_conflict(desk: Desk):
    """A worker that had stood still recorded its result before the operator spoke."""

    async def charge(ctx: Context) -> None:
        def effect() -> None:
            raise RuntimeError("the line went dead")

        desk.seen.append(await ctx.once("charge", effect))

    desk.app.on("pay", retries=2)(charge)
    runs: list[Run] = []
    effect_begin = desk.app.store.effect_begin

    async def kept(run: Run, name: str, **options: Any) -> Any:
        runs.append(run)
        return await effect_begin(run, name, **options)

    desk.app.store.effect_begin = kept  # type: ignore[method-assign]
    await desk.app.send("pay", {}, id="m-1")
    await desk.work()
    await desk.app.store.effect_done(runs[0], "charge", b'"late"')
    done = EffectWord(name="charge", word=Resumption.DONE, value=b'"mine"')
    await desk.parked.resume(await desk.parked.find("m-1"), effects=[done])
    await desk.work()
    assert await desk.status("m-1") == "succeeded"
    assert desk.seen == ["late"], "the result that was recorded counts"


async def test_short_names_and_cursors(desk: Desk):
    for n in range(3):
        await park(desk, f"order-{n}")
    with pytest.raises(Ambiguous) as caught:
        await desk.parked.find("order")
    assert len(caught.value.matches) == 3
    assert (await desk.parked.find("order-2")).message_id == "order-2"
    first = await desk.records.parked(limit=2)
    rest = await desk.records.parked(limit=2, before=first[-1][0])
    assert [task.message_id for _, task in (*first, *rest)] == ["order-2", "order-1", "order-0"]
