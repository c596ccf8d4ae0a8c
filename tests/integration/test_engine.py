"""How runs end: through the real engine, on real files, with and without the queue in the store."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from ackbone.core.broker import Outgoing
from ackbone.core.errors import FinalError, ParkMessage, RetryableError, ValidationError
from ackbone.core.events import FAILED, PARKED, RESUMED, RETRIED, SUCCEEDED
from ackbone.core.message import Message
from ackbone.core.outcome import Dead, Done, Park, Rejected, Retry
from ackbone.engine.context import Context, SyncContext
from tests.integration.lab import Lab


async def test_success(lab: Lab) -> None:
    app = await lab.open()

    @app.on("greeting")
    async def greet(ctx: Context) -> dict[str, str]:
        return {"hello": ctx.payload["name"]}

    await lab.start(app)
    receipt = await app.send("greeting", {"name": "Ada"})
    assert await lab.ends(receipt.id) == ["succeeded"]
    task = lab.task(receipt.id)
    assert task["result"] == b'{"hello":"Ada"}'
    assert (task["attempt"], task["retry_count"]) == (1, 0)
    assert task["body"] is None, "what succeeded needs no copy of its body"
    assert lab.kinds(receipt.id) == ["task.claimed", SUCCEEDED]
    assert lab.letters() == []
    event = await lab.events.wait_for(lambda e: e.type == SUCCEEDED)
    assert (event.task_id, event.tenant_id, event.subscription) == (
        receipt.id,
        "default",
        "default",
    )


async def test_many_messages_each_once(lab: Lab) -> None:
    app = await lab.open()
    seen: list[int] = []

    @app.on("n")
    async def take(ctx: Context) -> None:
        await asyncio.sleep(0)
        seen.append(ctx.payload)

    receipts = await asyncio.gather(*(app.send("n", n) for n in range(300)))
    await lab.start(app)
    await lab.ends(*(receipt.id for receipt in receipts))
    assert sorted(seen) == list(range(300))
    assert set(lab.statuses().values()) == {"succeeded"}


async def test_retry_waits_as_a_row_and_keeps_its_history(lab: Lab) -> None:
    app = await lab.open()
    attempts: list[tuple[int, int]] = []

    @app.on("flaky", retries=3)
    async def flaky(ctx: Context) -> str:
        attempts.append((ctx.attempt, ctx.retry_count))
        if ctx.attempt < 3:
            raise RetryableError(f"not yet {ctx.attempt}")
        return "now"

    await lab.start(app)
    receipt = await app.send("flaky")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert attempts == [(1, 0), (2, 1), (3, 2)]
    assert lab.kinds(receipt.id).count(RETRIED) == 2
    assert lab.finals(receipt.id) == [SUCCEEDED]
    assert lab.task(receipt.id)["retry_count"] == 2


async def test_a_long_wait_outlives_the_worker(lab: Lab) -> None:
    """A wait is a row with a due time: the worker may go, another one goes on."""
    app = await lab.open()

    @app.on("slow", retries=1)
    async def slow(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise RetryableError("later", retry_after_s=0.4)
        return ctx.attempt

    worker = await lab.start(app)
    receipt = await app.send("slow", {"keep": "me"})
    await lab.becomes(receipt.id, "ready")
    await lab.stop(worker)
    task = lab.task(receipt.id)
    assert task["due_at"] - task["started_at"] >= 400_000, "Retry-After is the least to wait"
    assert task["held"] == "store"
    await lab.start(app)
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert lab.task(receipt.id)["result"] == b"2"


async def test_dead_letter_keeps_body_and_history(lab: Lab) -> None:
    app = await lab.open()

    @app.on("broken", retries=2)
    async def broken(ctx: Context) -> None:
        raise RuntimeError(f"attempt {ctx.attempt}")

    await lab.start(app)
    receipt = await app.send("broken", {"the": "payload"})
    assert await lab.ends(receipt.id) == ["failed"]
    (letter,) = lab.letters()
    assert letter["message_id"] == receipt.id
    assert letter["reason"] == "retries_exhausted"
    assert letter["error"] == "RuntimeError: attempt 3"
    assert letter["retry_count"] == 3, "failures so far, the last one counted"
    assert [(h["attempt"], h["error"]) for h in letter["history"]] == [
        (n, f"RuntimeError: attempt {n}") for n in (1, 2, 3)
    ]
    assert b'"the":"payload"' in letter["body"]
    assert lab.finals(receipt.id) == [FAILED]


@pytest.mark.parametrize("error", [FinalError("no"), ValidationError("bad")])
async def test_final_errors_are_not_retried(one_file: Lab, error: Exception) -> None:
    app = await one_file.open()
    runs: list[int] = []

    @app.on("final", retries=5)
    async def final(ctx: Context) -> None:
        runs.append(ctx.attempt)
        raise error

    await one_file.start(app)
    receipt = await app.send("final")
    assert await one_file.ends(receipt.id) == ["failed"]
    assert runs == [1]
    assert one_file.letters()[0]["reason"] == "final_error"


class _Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class _Base(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
        StopIteration("end"),
        StopAsyncIteration(),
        TimeoutError("mine"),
        _Base("odd"),
        BaseExceptionGroup("group", [_Base("odd"), ValueError("x")]),
        _Silent(),
        RuntimeError("\udc80 lone"),
        RuntimeError("nul \0 byte"),
        RuntimeError("x" * 100_000),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_whatever_a_handler_raises_is_its_own_failure(
    one_file: Lab, error: BaseException, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that a handler raises ends the worker, loops for ever or touches a neighbour."""
    caplog.set_level(logging.CRITICAL, "ackbone")  # pytest-xdist cannot carry lone surrogates
    app = await one_file.open()

    async def raises(ctx: Context) -> None:
        raise error

    def raises_plain(ctx: SyncContext) -> None:
        raise error

    app.on("odd", retries=1)(raises if kind == "async" else raises_plain)

    @app.on("good")
    async def good(ctx: Context) -> None:
        return None

    worker = await one_file.start(app)
    odd = await app.send("odd")
    fine = await app.send("good")
    assert await one_file.ends(odd.id, fine.id) == ["failed", "succeeded"]
    (letter,) = one_file.letters()
    assert (letter["reason"], letter["retry_count"]) == ("retries_exhausted", 2)
    assert len(letter["history"]) == 2
    assert worker.failure is None
    assert not worker.stopped.is_set()


async def test_no_handler_parks_until_one_appears(lab: Lab) -> None:
    app = await lab.open()

    @app.on("known")
    async def known(ctx: Context) -> None:
        return None

    first = await lab.start(app)
    receipt = await app.send("unknown", {"n": 1})
    await lab.becomes(receipt.id, "parked")
    assert lab.task(receipt.id)["parked_kind"] == "workflow_pending"
    assert lab.kinds(receipt.id)[-1] == PARKED
    await lab.stop(first)

    attempts: list[int] = []

    @app.on("unknown", retries=1)
    async def unknown(ctx: Context) -> int:
        attempts.append(ctx.retry_count)
        if len(attempts) == 1:
            raise RuntimeError("once")
        return int(ctx.payload["n"])

    await lab.start(app)
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert RESUMED in lab.kinds(receipt.id)
    assert attempts == [0, 1], "waiting for a handler spends no retry"


async def test_a_handler_that_parks_is_not_resumed_by_itself(one_file: Lab) -> None:
    """The handler was there and said no: resumed because it is there, it would go in rounds."""
    app = await one_file.open()
    runs: list[str] = []

    @app.on("wait")
    async def wait(ctx: Context) -> None:
        runs.append(ctx.message.id)
        raise ParkMessage("the budget is not approved")

    worker = await one_file.start(app)
    receipt = await app.send("wait")
    await one_file.becomes(receipt.id, "parked")
    assert one_file.task(receipt.id)["error_message"] == "the budget is not approved"
    await worker._relays._resume_parked(worker.worker)
    assert one_file.status(receipt.id) == "parked"
    assert runs == [receipt.id]


async def test_star_takes_what_has_no_handler_of_its_own(one_file: Lab) -> None:
    app = await one_file.open()

    @app.on("a")
    async def only_a(ctx: Context) -> str:
        return "a"

    @app.on("*")
    async def rest(ctx: Context) -> str:
        return f"rest {ctx.message.type}"

    await one_file.start(app)
    first, second = await app.send("a"), await app.send("b")
    await one_file.ends(first.id, second.id)
    assert one_file.task(first.id)["result"] == b'"a"'
    assert one_file.task(second.id)["result"] == b'"rest b"'


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Done({"n": 1}), "succeeded"),
        (Dead(reason="mine", error="told so"), "failed"),
        (Park(kind="waiting_approval", reason="ask"), "parked"),
        (Rejected(reason="no", policies=("p",)), "rejected"),
    ],
)
async def test_a_handler_may_return_an_outcome(one_file: Lab, outcome: Any, status: str) -> None:
    app = await one_file.open()

    @app.on("choose")
    async def choose(ctx: Context) -> Any:
        return outcome

    await one_file.start(app)
    receipt = await app.send("choose")
    await one_file.becomes(receipt.id, status)


async def test_a_handler_may_return_a_retry(one_file: Lab) -> None:
    app = await one_file.open()

    @app.on("choose")
    async def choose(ctx: Context) -> Any:
        return Retry(after_s=0.01, reason="soon") if ctx.attempt == 1 else "done"

    await one_file.start(app)
    receipt = await app.send("choose")
    assert await one_file.ends(receipt.id) == ["succeeded"]
    assert one_file.kinds(receipt.id).count(RETRIED) == 1


async def test_a_result_that_json_cannot_carry_is_a_dead_letter(one_file: Lab) -> None:
    """At once: it would be the same after a retry. Nothing of the run is sent."""
    app = await one_file.open()
    runs = []

    @app.on("object")
    async def give(ctx: Context) -> object:
        runs.append(ctx.message.id)
        await ctx.reply("an answer")
        return {"nan": float("nan")} if ctx.payload else object()

    await one_file.start(app)
    first, second = await app.send("object"), await app.send("object", 1)
    assert await one_file.ends(first.id, second.id) == ["failed", "failed"]
    assert sorted(runs) == sorted([first.id, second.id])
    errors = {letter["message_id"]: letter["error"] for letter in one_file.letters()}
    assert errors[first.id].startswith("InvalidResult: the handler returned a object")
    assert "NaN" in errors[second.id]
    assert {letter["reason"] for letter in one_file.letters()} == {"final_error"}
    assert one_file.replies() == []


@pytest.mark.parametrize("wait", [float("inf"), 1e300, -5.0, float("nan"), "soon", "0.01"])
async def test_a_strange_retry_after_is_still_a_retry(one_file: Lab, wait: Any) -> None:
    app = await one_file.open()

    @app.on("later", retries=1)
    async def later(ctx: Context) -> None:
        raise RetryableError("later", retry_after_s=wait)

    await one_file.start(app)
    receipt = await app.send("later")
    await one_file.has_event(receipt.id, RETRIED)
    letters = one_file.letters()
    assert all(letter["reason"] != "unstorable" for letter in letters)


async def test_the_same_id_twice_runs_once(lab: Lab) -> None:
    app = await lab.open()
    runs: list[str] = []

    @app.on("one")
    async def one(ctx: Context) -> None:
        runs.append(ctx.message.id)

    await lab.start(app)
    await app.send("one", {"a": 1}, id="same")
    assert await lab.ends("same") == ["succeeded"]
    await app.send("one", {"a": 1}, id="same")
    mark = await app.send("one", {"a": 1})
    await lab.ends(mark.id)
    assert runs.count("same") == 1
    assert lab.finals("same") == [SUCCEEDED]


async def test_the_same_id_with_another_payload_is_kept_apart(lab: Lab) -> None:
    app = await lab.open()

    @app.on("one")
    async def one(ctx: Context) -> int:
        return int(ctx.payload["n"])

    await lab.start(app)
    await app.send("one", {"n": 1}, id="same")
    await lab.ends("same")
    await app.send("one", {"n": 2}, id="same")
    await lab.until(lab.letters, "a dead letter")
    (letter,) = lab.letters()
    assert letter["reason"] == "id_conflict"
    assert letter["message_id"] != "same"
    assert b'"n":2' in letter["body"]
    assert lab.task("same")["result"] == b"1"
    assert lab.finals("same") == [SUCCEEDED]
    assert lab.finals(letter["message_id"]) == [FAILED]


@pytest.mark.parametrize("codec", ["standard", "json", "text", "binary"])
async def test_a_retry_sees_the_same_message(lab: Lab, codec: str) -> None:
    app = await lab.open(queues={"default": {"codec": codec}})
    seen: list[Message] = []

    @app.on("n", retries=1)
    async def run(ctx: Context) -> None:
        seen.append(ctx.message)
        if ctx.attempt == 1:
            raise RuntimeError("again")

    await lab.start(app)
    payload: Any = b"bytes" if codec == "binary" else "text"
    options: dict[str, Any] = {
        "priority": 2,
        "correlation_id": "c",
        "channel": "x",
        "headers": {"h": "v"},
    }
    receipt = await app.send("n", payload, ordering_key="o", idempotency_key="k", **options)
    assert await lab.ends(receipt.id) == ["succeeded"]
    first, second = seen
    assert (first.payload, first.priority, first.ordering_key) == (payload, 2, "o")
    assert msgspec.structs.replace(second, attempt=1) == first


async def test_a_retry_of_a_foreign_message_sees_what_its_broker_said(lab: Lab) -> None:
    """A body and nothing else: time, priority and conversation are the broker's word."""
    app = await lab.open(queues={"default": {"codec": "json"}})
    seen: list[Message] = []

    @app.on("*", retries=1)
    async def run(ctx: Context) -> None:
        seen.append(ctx.message)
        if ctx.attempt == 1:
            raise RuntimeError("again")

    foreign = Outgoing(id="theirs", body=b"[1]", priority=3, key="chat")
    await app.broker.publish("default", [foreign])
    await lab.start(app)
    await lab.until(lambda: len(seen) == 2, "two attempts")
    first, second = seen
    assert (first.payload, first.priority, first.ordering_key) == ([1], 3, "chat")
    assert msgspec.structs.replace(second, attempt=1) == first
