"""What stands around a run: guard, middleware, observers, breaker."""

import asyncio
from typing import Any

import pytest

from ackbone.core.events import FAILED, REJECTED, RELEASED, SUCCEEDED, Event
from ackbone.engine.context import Context
from ackbone.engine.guard import Decision
from ackbone.engine.wiring import CallNext
from tests.integration.lab import Lab


async def test_a_guard_denies(lab: Lab) -> None:
    app = await lab.open()
    asked: list[dict[str, Any]] = []
    runs: list[str] = []

    @app.guard
    async def guard(context: dict[str, Any]) -> Decision:
        asked.append(context)
        return Decision(allowed=context["type"] != "delete", reason="not here", policies=("p1",))

    async def run(ctx: Context) -> None:
        runs.append(ctx.message.type)

    app.on("*")(run)
    await lab.start(app)
    denied = await app.send("delete", tenant_id="acme")
    allowed = await app.send("read")
    assert await lab.ends(denied.id, allowed.id) == ["rejected", "succeeded"]
    assert runs == ["read"]
    assert asked[0] == {
        "source": "queue_trigger",
        "queue": "default",
        "message_id": denied.id,
        "tenant_id": "acme",
        "type": "delete",
        "channel": "",
        "user": "",
        "priority": 1,
        "payload": None,
        "attempt": 1,
        "approved": frozenset(),
    }
    (data,) = (data for kind, data in lab.history(denied.id) if kind == REJECTED)
    assert (data["reason"], data["policies"]) == ("not here", ["p1"])
    assert [letter["reason"] for letter in lab.letters()] == ["rejected"], "ack_policy is dlq"


@pytest.mark.parametrize("fault", ["raises", "hangs", "none", "words", "exits"])
async def test_a_guard_that_fails_never_means_allow(lab: Lab, fault: str) -> None:
    """Retried by the handler's policy, then a dead letter; the handler never runs."""
    app = await lab.open(worker={"guard_timeout_s": 0.05})
    asked: list[int] = []
    runs: list[str] = []

    @app.guard
    async def guard(context: dict[str, Any]) -> Any:
        asked.append(context["attempt"])
        match fault:
            case "raises":
                raise RuntimeError("the rules cannot be read")
            case "hangs":
                await asyncio.Event().wait()
            case "words":
                return Decision(allowed="no")  # type: ignore[arg-type]
            case "exits":
                raise SystemExit(1)
        return None

    @app.on("n", retries=2)
    async def run(ctx: Context) -> None:
        runs.append(ctx.message.id)

    worker = await lab.start(app)
    receipt = await app.send("n")
    (status,) = await lab.ends(receipt.id)
    assert runs == []
    if fault == "words":
        assert status == "rejected"
    else:
        assert (status, asked) == ("failed", [1, 2, 3])
        assert lab.letters()[0]["reason"] == "retries_exhausted"
    assert worker.failure is None


async def test_middleware_wraps_from_the_outside_in(lab: Lab) -> None:
    app = await lab.open()
    seen: list[str] = []

    def make(name: str) -> None:
        async def wrap(ctx: Context, call_next: CallNext) -> Any:
            seen.append(f"{name} before")
            try:
                return [name, await call_next(ctx)]
            finally:
                seen.append(f"{name} after")

        app.middleware(wrap)

    make("outer")
    make("inner")

    @app.on("async")
    async def run(ctx: Context) -> str:
        seen.append("handler")
        return "result"

    @app.on("plain")
    def plain(ctx: Any) -> str:
        seen.append("handler")
        return "result"

    await lab.start(app)
    for kind in ("async", "plain"):
        seen.clear()
        receipt = await app.send(kind)
        await lab.ends(receipt.id)
        assert seen == ["outer before", "inner before", "handler", "inner after", "outer after"]
        assert lab.task(receipt.id)["result"] == b'["outer",["inner","result"]]'


async def test_an_error_of_middleware_is_the_runs_error(lab: Lab) -> None:
    app = await lab.open()
    runs: list[int] = []

    @app.middleware
    async def wrap(ctx: Context, call_next: CallNext) -> Any:
        if ctx.attempt == 1:
            raise RuntimeError("not at first")
        return await call_next(ctx)

    @app.on("n", retries=1)
    async def run(ctx: Context) -> None:
        runs.append(ctx.attempt)

    await lab.start(app)
    receipt = await app.send("n")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert runs == [2]


async def test_observers_only_watch(lab: Lab) -> None:
    """An observer that raises changes nothing, and the next one is still told."""
    app = await lab.open()
    seen: list[Event] = []

    @app.observe
    def broken(event: Event) -> None:
        raise RuntimeError("observers have no say")

    app.observe(seen.append)

    @app.on("n", retries=0)
    async def run(ctx: Context) -> None:
        if ctx.payload:
            raise RuntimeError("bad")

    worker = await lab.start(app)
    good, bad = await app.send("n"), await app.send("n", 1)
    assert await lab.ends(good.id, bad.id) == ["succeeded", "failed"]
    ends = {(good.id, SUCCEEDED), (bad.id, FAILED)}
    await lab.until(lambda: ends <= {(e.task_id, e.type) for e in seen}, lambda: seen)
    assert worker.failure is None


async def test_the_breaker_spares_the_backlog(lab: Lab) -> None:
    """Everything fails: one at a time is tried, nothing is dead-lettered, then all succeed."""
    app = await lab.open(breaker={"failures": 3, "probe_s": 0.05}, worker={"slots": 4})
    broken = True
    attempts: dict[str, int] = {}
    at_once = most = 0

    @app.on("n", retries=1000)
    async def run(ctx: Context) -> None:
        nonlocal at_once, most
        attempts[ctx.message.id] = attempts.get(ctx.message.id, 0) + 1
        at_once += 1
        if sum(attempts.values()) > 8:  # the first batch may still be on its way when it opens
            most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1
        if broken:
            raise RuntimeError("upstream is down")

    ids = [(await app.send("n", n)).id for n in range(30)]
    await lab.start(app)
    await lab.until(lambda: sum(attempts.values()) >= 12, "a few probes")
    tried = len(attempts)
    assert most == 1, "while it is open, one message at a time"
    broken = False
    assert set(await lab.ends(*ids)) == {"succeeded"}
    assert lab.letters() == []
    assert tried < 30, "the backlog was not run through"
    for message_id in ids:
        assert lab.task(message_id)["attempt"] == attempts[message_id], "waiting spends no attempt"


async def test_the_breaker_holds_its_own_handler_only(lab: Lab) -> None:
    app = await lab.open(breaker={"failures": 2, "probe_s": 3600.0})
    runs: list[int] = []

    @app.on("bad", retries=1000)
    async def bad(ctx: Context) -> None:
        runs.append(ctx.attempt)
        raise RuntimeError("down")

    @app.on("good")
    async def good(ctx: Context) -> None:
        return None

    await lab.start(app)
    held = [(await app.send("bad", n)).id for n in range(4)]
    await lab.until(lambda: len(runs) >= 2, "it opens")
    fine = [(await app.send("good", n)).id for n in range(20)]
    assert set(await lab.ends(*fine)) == {"succeeded"}
    for message_id in held:
        await lab.becomes(message_id, "ready")
    released = sum(lab.kinds(message_id).count(RELEASED) for message_id in held)
    assert released <= 8, f"handed back {released} times: it goes in rounds"
    assert len(runs) <= 4


async def test_any_success_ends_a_row_of_failures(lab: Lab) -> None:
    """Also that of the very first run, begun before anything failed."""
    app = await lab.open(breaker={"failures": 2, "probe_s": 3600.0})
    go_on = asyncio.Event()

    @app.on("n", retries=0)
    async def run(ctx: Context) -> None:
        if ctx.payload == "slow":
            await go_on.wait()
        elif ctx.payload == "bad":
            raise RuntimeError("down")

    await lab.start(app)
    slow = (await app.send("n", "slow")).id
    await lab.becomes(slow, "running")
    assert await lab.ends((await app.send("n", "bad")).id) == ["failed"]
    go_on.set()
    assert await lab.ends(slow) == ["succeeded"]
    assert await lab.ends((await app.send("n", "bad")).id) == ["failed"]
    last = (await app.send("n", "fine")).id
    assert await lab.ends(last) == ["succeeded"], "two failures, but not in a row"


async def test_a_probe_that_is_denied_does_not_close_the_door(lab: Lab) -> None:
    """The guard refuses the probe, another message is tried, and the breaker closes."""
    app = await lab.open(breaker={"failures": 2, "probe_s": 0.02}, worker={"slots": 2})
    broken = True

    @app.guard
    async def guard(context: dict[str, Any]) -> Decision:
        return Decision(allowed=broken or not context["message_id"].startswith("deny"))

    @app.on("n", retries=1000)
    async def run(ctx: Context) -> None:
        if broken:
            raise RuntimeError("down")

    await lab.start(app)
    # While it is open one message is tried at a time: which one, and whether the others are claimed
    # meanwhile, is left open.
    denied = [(await app.send("n", n, id=f"deny-{n}")).id for n in range(3)]
    await lab.until(
        lambda: sum(lab.kinds(m).count("task.retried") for m in denied) >= 2, "it opens"
    )
    fine = [(await app.send("n", n)).id for n in range(3)]
    broken = False
    assert await lab.ends(*denied, *fine) == ["rejected"] * 3 + ["succeeded"] * 3
