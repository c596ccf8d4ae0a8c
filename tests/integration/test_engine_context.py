"""What a handler does through its context: all of it commits with the run, or none."""

import asyncio
import socket
from typing import Any

import pytest

from ackbone.config import Tasks
from ackbone.core.errors import InvalidMessage, NotDone
from ackbone.core.events import HEARTBEAT, PARKED, SUCCEEDED, Event
from ackbone.engine.context import Context, SyncContext
from ackbone.testing import Signal
from tests.integration.lab import ONE_FILE, Lab


async def test_replies_commit_with_the_run(lab: Lab) -> None:
    app = await lab.open()

    @app.on("ask", retries=1)
    async def answer(ctx: Context) -> None:
        await ctx.reply(f"one {ctx.attempt}")
        await ctx.reply(f"two {ctx.attempt}", channel="mail", recipient="ada@example.org")
        if ctx.attempt == 1:
            raise RuntimeError("after replying")

    await lab.start(app)
    receipt = await app.send("ask", channel="telegram", metadata={"chat_id": 42})
    await lab.ends(receipt.id)
    assert lab.rows(
        "SELECT channel, recipient, content, task_id FROM deliveries ORDER BY rowid"
    ) == [
        ("telegram", "42", "one 2", receipt.id),
        ("mail", "ada@example.org", "two 2", receipt.id),
    ]


async def test_a_text_for_somebody_else_with_all_that_its_channel_understands(lab: Lab) -> None:
    app = await lab.open()
    refused: list[str] = []

    @app.on("ask")
    async def answer(ctx: Context) -> None:
        for wrong in ("", "https://example.org/" + "x" * 2048):
            with pytest.raises(InvalidMessage) as caught:
                await ctx.send_to("webhook", wrong, "hello")
            refused.append(str(caught.value))
        with pytest.raises(InvalidMessage, match="mapping"):
            await ctx.reply("hello", options=["silent"])  # type: ignore[arg-type]
        await ctx.send_to(
            "telegram", "-42", "news", scheduled=True, options={"silent": True}, expires_s=60
        )
        await ctx.reply("well", options={"subject": "hi"})

    await lab.start(app)
    receipt = await app.send("ask", channel="email", metadata={"user_id": "ada@example.org"})
    await lab.ends(receipt.id)
    assert all("1 to 2048 characters" in text for text in refused)
    assert lab.rows(
        "SELECT channel, recipient, priority, options, expires_at IS NOT NULL FROM deliveries"
        " ORDER BY rowid"
    ) == [
        ("telegram", "-42", 0, '{"silent":true}', 1),
        ("email", "ada@example.org", 2, '{"subject":"hi"}', 0),
    ]


async def test_a_reply_now_is_not_undone(lab: Lab) -> None:
    app = await lab.open()
    replied = asyncio.Event()
    go_on = asyncio.Event()

    @app.on("ask", retries=0)
    async def answer(ctx: Context) -> None:
        await ctx.reply("working on it", now=True)
        await ctx.reply("never sent")
        replied.set()
        await go_on.wait()
        raise RuntimeError("failed")

    await lab.start(app)
    receipt = await app.send("ask")
    await asyncio.wait_for(replied.wait(), 20)
    assert lab.replies() == ["working on it"], "before the run ends"
    go_on.set()
    assert await lab.ends(receipt.id) == ["failed"]
    assert lab.replies() == ["working on it"]


async def test_follow_ups_commit_with_the_run(lab: Lab) -> None:
    """In one file they are in the queue with the commit; else in the outbox."""
    app = await lab.open()

    @app.on("parent", retries=1)
    async def parent(ctx: Context) -> str:
        child = await ctx.send("child", {"attempt": ctx.attempt}, queue="children", priority=3)
        if ctx.attempt == 1:
            raise RuntimeError("after sending")
        return child

    await lab.start(app)
    receipt = await app.send("parent", tenant_id="acme")
    await lab.ends(receipt.id)
    table = "messages" if lab.mode == ONE_FILE else "outbox"
    name = "queue" if lab.mode == ONE_FILE else "queue_name"
    (sent,) = lab.rows(f"SELECT message_id, {name}, priority, body FROM {table}")
    assert sent[0] == lab.task(receipt.id)["result"].decode().strip('"')
    assert sent[1:3] == ("children", 3)
    assert b'"attempt":2' in sent[3]
    assert b'"acme"' in sent[3], "the tenant goes along"
    assert receipt.id.encode() in sent[3], "and so does the correlation"


async def test_follow_ups_run(one_file: Lab) -> None:
    app = await one_file.open()
    seen: list[Any] = []

    @app.on("count")
    async def count(ctx: Context) -> None:
        seen.append(ctx.payload)
        if ctx.payload < 5:
            await ctx.send("count", ctx.payload + 1)

    await one_file.start(app)
    await app.send("count", 1)
    await one_file.until(lambda: len(seen) == 5, lambda: seen)
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "bad",
    [{"payload": object()}, {"payload": float("nan")}, {"queue": "no/such name"}, {"what": 1}],
    ids=["object", "nan", "queue", "option"],
)
async def test_a_follow_up_that_cannot_be_sent_is_refused_in_the_handler(
    one_file: Lab, bad: dict[str, Any]
) -> None:
    app = await one_file.open()
    raised: list[str] = []

    @app.on("parent")
    async def parent(ctx: Context) -> None:
        try:
            await ctx.send("child", **bad)
        except InvalidMessage as error:
            raised.append(str(error))

    await one_file.start(app)
    receipt = await app.send("parent")
    assert await one_file.ends(receipt.id) == ["succeeded"]
    assert len(raised) == 1


async def test_usage_adds_up(lab: Lab) -> None:
    app = await lab.open()

    @app.on("think")
    async def think(ctx: Context) -> None:
        ctx.usage(llm_calls=1, tokens=100, cost=0.5)
        ctx.usage(tokens=23)
        ctx.usage(llm_calls=2, cost=0.25)

    await lab.start(app)
    receipt = await app.send("think")
    await lab.ends(receipt.id)
    (data,) = (data for kind, data in lab.history(receipt.id) if kind == SUCCEEDED)
    assert data["usage"] == {"llm_calls": 3, "tokens": 123, "cost": 0.75}


async def test_heartbeats_are_events(lab: Lab) -> None:
    app = await lab.open()

    @app.on("long")
    async def long(ctx: Context) -> None:
        await ctx.heartbeat({"step": 1})
        await ctx.heartbeat()

    await lab.start(app)
    receipt = await app.send("long")
    await lab.ends(receipt.id)
    beats = [data for kind, data in lab.history(receipt.id) if kind == HEARTBEAT]
    assert all(beat.pop("consumer").startswith("app@") for beat in beats)
    assert beats == [{"attempt": 1, "step": 1}, {"attempt": 1}]


async def test_a_long_task_has_a_pulse_without_asking_for_it(lab: Lab) -> None:
    app = await lab.open(
        queues={"work": {"codec": "task"}, "other": {}}, tasks=Tasks(heartbeat_interval_s=0.05)
    )

    heard: Signal[Event] = Signal("heartbeats")

    @app.observe
    def hear(event: Event) -> None:
        if event.type == HEARTBEAT:
            heard.emit(event)

    @app.on("long", queue="work")
    @app.on("long", queue="other")
    async def long(ctx: Context) -> None:
        await heard.wait(2)

    await lab.start(app)
    receipt, other = await app.send("long", queue="work"), await app.send("long", queue="other")
    await lab.ends(receipt.id)
    await lab.ends(other.id)
    beats = [data for kind, data in lab.history(receipt.id) if kind == HEARTBEAT]
    assert len(beats) >= 2
    assert {beat["attempt"] for beat in beats} == {1}
    assert all(beat["consumer"] and beat["running_s"] >= 0 for beat in beats)
    assert HEARTBEAT not in [kind for kind, _ in lab.history(other.id)], "that is no task"


async def test_a_plain_handler_has_the_same_context(lab: Lab) -> None:
    app = await lab.open()
    calls: list[str] = []

    def charge(key: str) -> dict[str, str]:
        calls.append(key)
        return {"key": key}

    @app.on("plain", retries=1)
    def plain(ctx: SyncContext) -> list[Any]:
        ctx.reply("hello")
        child = ctx.send("child", {"n": 1}, queue="children")
        ctx.usage(tokens=7)
        ctx.heartbeat({"half": True})
        charged = ctx.once("charge", charge)
        if ctx.attempt == 1:
            raise RuntimeError("after the effect")
        return [child != "", charged, ctx.attempt, ctx.retry_count, ctx.tenant_id, ctx.payload]

    await lab.start(app)
    receipt = await app.send("plain", "p", idempotency_key="k")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert lab.task(receipt.id)["result"] == b'[true,{"key":"k:charge"},2,1,"default","p"]'
    assert calls == ["k:charge"]
    assert lab.replies() == ["hello"]
    assert lab.kinds(receipt.id).count(HEARTBEAT) == 2


async def test_once_returns_the_recorded_result(lab: Lab) -> None:
    app = await lab.open()
    calls: list[str] = []

    async def charge(key: str) -> dict[str, str]:
        calls.append(key)
        return {"charged": key}

    @app.on("pay", retries=2)
    async def pay(ctx: Context) -> Any:
        charged = await ctx.once("charge", charge)
        if ctx.attempt < 3:
            raise RuntimeError("after the effect")
        return charged

    await lab.start(app)
    receipt = await app.send("pay")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert calls == [f"{receipt.id}:charge"]
    assert lab.task(receipt.id)["result"] == f'{{"charged":"{receipt.id}:charge"}}'.encode()


@pytest.mark.parametrize("policy", ["park", "again", "skip"])
async def test_once_when_nobody_knows(lab: Lab, policy: str) -> None:
    """An effect that was begun and never recorded: the policy decides, not luck."""
    app = await lab.open()
    calls: list[int] = []

    @app.on("pay", retries=5)
    async def pay(ctx: Context) -> Any:
        def effect() -> str:
            calls.append(ctx.attempt)
            if ctx.attempt == 1:
                raise ConnectionError("the answer was lost")
            return "paid"

        return {"got": await ctx.once("charge", effect, on_unknown=policy)}

    await lab.start(app)
    receipt = await app.send("pay")
    match policy:
        case "park":
            await lab.becomes(receipt.id, "parked")
            assert lab.task(receipt.id)["parked_kind"] == "effect_unknown"
            assert lab.kinds(receipt.id)[-1] == PARKED
            reason = lab.task(receipt.id)["error_message"]
            assert "effect 'charge' raised ConnectionError: the answer was lost" in reason
            assert calls == [1]
        case "again":
            assert await lab.ends(receipt.id) == ["succeeded"]
            assert calls == [1, 2]
            assert lab.task(receipt.id)["result"] == b'{"got":"paid"}'
        case _:
            assert await lab.ends(receipt.id) == ["succeeded"]
            assert calls == [1]
            assert lab.task(receipt.id)["result"] == b'{"got":null}'


class OutOfStock(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("nobody is there"),
        socket.gaierror(-2, "no such name"),
        NotDone("they said no"),
        OutOfStock(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_once_after_an_error_that_proves_nothing_happened(lab: Lab, error: Exception) -> None:
    app = await lab.open()
    calls: list[int] = []

    @app.on("pay", retries=5)
    async def pay(ctx: Context) -> Any:
        def effect() -> str:
            calls.append(ctx.attempt)
            if ctx.attempt < 3:
                raise error
            return "paid"

        return await ctx.once("charge", effect, not_done=(OutOfStock,))

    await lab.start(app)
    receipt = await app.send("pay")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert calls == [1, 2, 3]


async def test_once_that_is_cancelled_before_the_effect_is_not_unknown(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain that meets the intent: nothing was done, so nobody need be asked about it."""
    app = await lab.open()
    calls: list[int] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.on("pay")
    async def pay(ctx: Context) -> Any:
        return await ctx.once("charge", lambda: calls.append(ctx.attempt))

    effect_begin = app.store.effect_begin

    async def slow(*args: Any, **options: Any) -> Any:
        """Written; the answer takes a while."""
        found = await effect_begin(*args, **options)
        begun.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(app.store, "effect_begin", slow)
    worker = await lab.start(app)
    receipt = await app.send("pay")
    await asyncio.wait_for(begun.wait(), 20)
    stopping = asyncio.create_task(lab.stop(worker, 0.0))
    await lab.until(
        lambda: any(active.cause for active in worker._executor.active), "it is told to stop"
    )
    go_on.set()
    await stopping
    assert calls == []
    await lab.start(app)
    await lab.until(lambda: lab.status(receipt.id) in ("succeeded", "parked"), "it went on")
    assert lab.status(receipt.id) == "succeeded"
    assert calls == [1]


async def test_effects_of_two_messages_are_apart(lab: Lab) -> None:
    app = await lab.open()
    calls: list[str] = []

    @app.on("pay")
    async def pay(ctx: Context) -> None:
        await ctx.once("charge", lambda: calls.append(ctx.message.id))
        await ctx.once("mail", lambda: calls.append(ctx.message.id))

    await lab.start(app)
    first, second = await app.send("pay", 1), await app.send("pay", 2)
    await lab.ends(first.id, second.id)
    assert sorted(calls) == sorted([first.id, first.id, second.id, second.id])


async def test_a_reply_must_be_text(one_file: Lab) -> None:
    app = await one_file.open()

    @app.on("ask", retries=0)
    async def answer(ctx: Context) -> None:
        await ctx.reply(b"bytes")

    await one_file.start(app)
    receipt = await app.send("ask")
    assert await one_file.ends(receipt.id) == ["failed"]
    assert "a reply is text" in one_file.letters()[0]["error"]
