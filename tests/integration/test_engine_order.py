"""What runs before what: conversations, priorities, delays, times to live, paused queues."""

import asyncio
import random
import sqlite3

import pytest

from ackbone.app import App
from ackbone.core.broker import Outgoing
from ackbone.core.errors import ParkMessage
from ackbone.core.events import EXPIRED, FAILED
from ackbone.engine.context import Context
from ackbone.engine.worker_relays import WorkerRelays
from ackbone.testing import FakeClock
from tests.integration.lab import Lab
from tests.servers.stores import sqlite_store


async def test_each_conversation_in_order(lab: Lab) -> None:
    app = await lab.open()
    seen: dict[str, list[int]] = {}
    dice = random.Random(7)

    @app.on("chat", retries=20)
    async def chat(ctx: Context) -> None:
        await asyncio.sleep(dice.random() * 0.002)
        if dice.random() < 0.2:
            raise RuntimeError("again")
        seen.setdefault(str(ctx.message.ordering_key), []).append(ctx.payload)

    ids = []
    for n in range(10):
        for lane in range(6):
            ids.append((await app.send("chat", n, ordering_key=f"c{lane}")).id)
    await lab.start(app)
    assert set(await lab.ends(*ids)) == {"succeeded"}
    assert seen == {f"c{lane}": list(range(10)) for lane in range(6)}


async def test_a_waiting_retry_holds_its_conversation_and_no_other(lab: Lab) -> None:
    app = await lab.open()
    seen: list[str] = []
    fail = True

    @app.on("chat", retries=50)
    async def chat(ctx: Context) -> None:
        if ctx.payload == "a1" and fail:
            raise RuntimeError("again")
        seen.append(ctx.payload)

    await lab.start(app)
    head = await app.send("chat", "a1", ordering_key="a")
    behind = await app.send("chat", "a2", ordering_key="a")
    other = await app.send("chat", "b1", ordering_key="b")
    free = await app.send("chat", "free")
    await lab.ends(other.id, free.id)
    await lab.has_event(head.id, "task.retried", 3)
    assert lab.status(behind.id) == "queued"
    fail = False
    await lab.ends(head.id, behind.id)
    assert seen[-2:] == ["a1", "a2"]


async def test_a_dead_letter_lets_its_conversation_go(lab: Lab) -> None:
    app = await lab.open()

    @app.on("chat", retries=0)
    async def chat(ctx: Context) -> None:
        if ctx.payload == "bad":
            raise RuntimeError("dead")

    ids = [(await app.send("chat", p, ordering_key="a")).id for p in ("bad", "good", "bad", "good")]
    await lab.start(app)
    assert await lab.ends(*ids) == ["failed", "succeeded", "failed", "succeeded"]


@pytest.mark.parametrize("on_parked", ["wait", "skip"])
async def test_a_parked_message_holds_its_conversation_or_not(lab: Lab, on_parked: str) -> None:
    app = await lab.open(queues={"default": {"on_parked": on_parked}})

    @app.on("chat")
    async def chat(ctx: Context) -> None:
        if ctx.payload == "park":
            raise ParkMessage("ask first", kind="waiting_approval")

    await lab.start(app)
    head = await app.send("chat", "park", ordering_key="a")
    await lab.becomes(head.id, "parked")
    behind = await app.send("chat", "next", ordering_key="a")
    mark = await app.send("chat", "mark", ordering_key="b")
    await lab.ends(mark.id)
    if on_parked == "skip":
        assert await lab.ends(behind.id) == ["succeeded"]
    else:
        assert lab.status(behind.id) == "queued"


@pytest.mark.parametrize("end", ["expired", "duplicate"])
async def test_a_head_that_ends_at_its_claim_lets_the_next_go(
    lab: Lab, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never ran, but its conversation must not wait for a net to notice."""
    monkeypatch.setattr(WorkerRelays, "_resolve", _nothing)
    app = await lab.open()
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.on("chat")
    async def chat(ctx: Context) -> None:
        if ctx.payload == "first":
            running.set()
            await go_on.wait()

    await lab.start(app)
    done = await app.send("chat", "done", idempotency_key="k")
    await lab.ends(done.id)
    first = await app.send("chat", "first", ordering_key="a")
    await asyncio.wait_for(running.wait(), 20)
    option = {"ttl_s": 0.001} if end == "expired" else {"idempotency_key": "k"}
    ids = [first.id]
    for _ in range(3):
        ids.append((await app.send("chat", "ends", ordering_key="a", **option)).id)
        ids.append((await app.send("chat", "next", ordering_key="a")).id)
    go_on.set()
    assert await lab.ends(*ids) == ["succeeded"] + [end, "succeeded"] * 3


async def _nothing(*_: object) -> None:
    """A net that holds nothing."""


async def test_priorities(lab: Lab) -> None:
    app = await lab.open(worker={"slots": 1})
    seen: list[int] = []

    @app.on("n")
    async def take(ctx: Context) -> None:
        seen.append(ctx.message.priority)

    ids = [(await app.send("n", priority=p)).id for p in (0, 1, 2, 3) * 3]
    await lab.start(app)
    await lab.ends(*ids)
    assert seen == sorted(seen, reverse=True)


async def test_priority_over_what_the_store_holds(one_file: Lab) -> None:
    """A backlog of due retries does not stand in the way of a critical message.

    Where the broker is elsewhere, two fetchers share the slots, and their order is not promised.
    """
    lab = one_file
    app = await lab.open(worker={"slots": 1})
    seen: list[str] = []
    fail = True

    @app.on("n", retries=100)  # a slow machine fails often until the worker is stopped
    async def take(ctx: Context) -> None:
        if fail:
            raise RuntimeError("later")
        seen.append(ctx.payload)

    worker = await lab.start(app)
    old = [(await app.send("n", "old")).id for _ in range(5)]
    for message_id in old:
        await lab.has_event(message_id, "task.retried")
    await lab.stop(worker)
    fail = False
    critical = await app.send("n", "critical", priority=3)
    low = await app.send("n", "low", priority=0)
    await lab.until(
        lambda: (
            not lab.rows(
                "SELECT 1 FROM queue_executions WHERE status = 'ready' AND due_at > ?",
                app.clock.now_us(),
            )
        ),
        "all retries are due",
    )
    await lab.start(app)
    await lab.ends(critical.id, low.id, *old)
    assert seen == ["critical", *["old"] * 5, "low"]


async def test_delay(lab: Lab) -> None:
    clock = FakeClock()
    app = await lab.open(clock=clock)
    seen: list[str] = []

    @app.on("later")
    async def later(ctx: Context) -> None:
        seen.append(ctx.payload)

    await lab.start(app)
    late = await app.send("later", "late", delay_s=3600)
    now = await app.send("later", "now")
    await lab.ends(now.id)
    clock.advance(3599)
    mark = await app.send("later", "mark")
    await lab.ends(mark.id)
    assert seen == ["now", "mark"]
    clock.advance(1)
    assert await lab.ends(late.id) == ["succeeded"]


async def test_time_to_live(lab: Lab) -> None:
    """Over its time before it could run: expired, kept, never run."""
    clock = FakeClock()
    app = await lab.open(clock=clock)
    runs: list[str] = []

    @app.on("news")
    async def news(ctx: Context) -> None:
        runs.append(ctx.payload)

    old = await app.send("news", "old", ttl_s=60)
    fresh = await app.send("news", "fresh", ttl_s=7200)
    clock.advance(3600)
    await lab.start(app)
    assert await lab.ends(old.id, fresh.id) == ["expired", "succeeded"]
    assert runs == ["fresh"]
    (letter,) = lab.letters()
    assert (letter["message_id"], letter["reason"]) == (old.id, "expired")
    assert b'"old"' in letter["body"]
    assert lab.finals(old.id) == [EXPIRED]


async def test_time_to_live_ends_a_retry_that_waits(lab: Lab) -> None:
    clock = FakeClock()
    app = await lab.open(clock=clock)

    @app.on("news", retries=5)
    async def news(ctx: Context) -> None:
        raise RuntimeError("again")

    await lab.start(app)
    receipt = await app.send("news", ttl_s=60)
    await lab.has_event(receipt.id, "task.retried")
    clock.advance(61)
    assert await lab.ends(receipt.id) == ["expired"]
    assert lab.finals(receipt.id) == [EXPIRED]
    assert lab.letters()[0]["history"], "what failed before stays in its history"


async def test_pause_and_resume(lab: Lab) -> None:
    app = await lab.open()

    async def run(ctx: Context) -> None:
        return None

    app.on("n", queue="a")(run)
    app.on("n", queue="b")(run)
    await _pause(app, "a", paused=True)
    await lab.start(app)
    held = await app.send("n", queue="a")
    free = await app.send("n", queue="b")
    await lab.ends(free.id)
    assert lab.status(held.id) is None, "nothing of a paused queue is even claimed"
    await _pause(app, "a", paused=False)
    assert await lab.ends(held.id) == ["succeeded"]


async def _pause(app: App, queue: str, *, paused: bool) -> None:
    def op(conn: sqlite3.Connection) -> None:
        conn.execute(
            "INSERT INTO sources (subscription, paused_at) VALUES (?, ?)"
            " ON CONFLICT (subscription, part) DO UPDATE SET paused_at = excluded.paused_at",
            (queue, 1 if paused else None),
        )

    await sqlite_store(app).file.write(op)


async def test_undecodable_bytes_go_to_dead_letters_and_block_nobody(lab: Lab) -> None:
    app = await lab.open()

    @app.on("n")
    async def run(ctx: Context) -> None:
        return None

    bad = [b"\xff\xfe", b"", b"[1, 2]", b'{"version": "7.0"}', b"[" * 200_000, b'{"a": 1e999999}']
    await app.broker.publish(
        "default", [Outgoing(id=f"bad-{n}", body=body) for n, body in enumerate(bad)]
    )
    good = await app.send("n")
    await lab.start(app)
    assert await lab.ends(good.id) == ["succeeded"]
    await lab.until(lambda: len(lab.letters()) >= len(bad), lab.letters)
    letters = lab.letters()
    assert {letter["reason"] for letter in letters} == {"undecodable"}
    assert sorted(letter["body"] for letter in letters) == sorted(bad)
    for letter in letters:
        assert lab.finals(letter["message_id"]) == [FAILED]
