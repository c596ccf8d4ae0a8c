"""The store is away while a run writes: that is no failure of the handler, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ackbone.app import App
from ackbone.core.errors import StoreUnavailable
from ackbone.engine import patient_store
from ackbone.engine.context import Context, SyncContext
from ackbone.engine.executor import Executor
from tests.integration.lab import ONE_FILE, Lab

pytestmark = pytest.mark.parametrize("lab", [ONE_FILE], indirect=True)


class Outage:
    """Writes of runs fail, before or after their commit, until it is over."""

    def __init__(self, app: App, *, committed: bool = False) -> None:
        self.calls = 0
        self.is_over = asyncio.Event()
        self._committed = committed
        for name in ("effect_begin", "effect_done", "heartbeat", "reply_now"):
            setattr(app.store, name, self._failing(getattr(app.store, name)))

    def _failing(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def failing(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.is_over.is_set():
                return await call(*arguments, **options)
            if self._committed:
                await call(*arguments, **options)
            raise StoreUnavailable("the server is away")

        return failing


async def after_calls(outage: Outage, n: int) -> None:
    while outage.calls < n:  # noqa: ASYNC110 - counted by the store's callers
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("committed", [False, True], ids=["nothing written", "answers lost"])
async def test_a_run_waits_for_the_store(lab: Lab, committed: bool) -> None:
    app = await lab.open(breaker={"failures": 1, "probe_s": 3600.0})
    outage = Outage(app, committed=committed)
    charged: list[str] = []

    @app.on("pay", retries=0)
    async def pay(ctx: Context) -> Any:
        await ctx.heartbeat({"at": 1})
        await ctx.reply("one moment", now=True)

        def charge() -> str:
            charged.append("called")
            return "paid"

        return await ctx.once("charge", charge)

    await lab.start(app)
    receipt = await app.send("pay", channel="terminal")
    await after_calls(outage, 3)
    outage.is_over.set()
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert charged == ["called"]
    assert lab.task(receipt.id)["attempt"] == 1
    assert lab.kinds(receipt.id).count("effect.done") == 1
    assert len(lab.rows("SELECT 1 FROM deliveries")) == 1


async def test_an_intent_of_this_run_that_was_not_heard_of_is_no_unknown_effect(lab: Lab) -> None:
    """Only the answer to the intent is lost; the effect runs once."""
    app = await lab.open()
    effect_begin = app.store.effect_begin
    lost: list[Any] = []

    async def begin(*arguments: Any, **options: Any) -> Any:
        found = await effect_begin(*arguments, **options)
        if len(lost) < 2:
            lost.append(found)
            raise StoreUnavailable("the answer was lost")
        return found

    app.store.effect_begin = begin  # type: ignore[method-assign]
    charged: list[str] = []

    @app.on("pay", retries=0)
    async def pay(ctx: Context) -> Any:
        return await ctx.once("charge", lambda: charged.append("called"))

    await lab.start(app)
    receipt = await app.send("pay")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert charged == ["called"]


async def test_an_outage_is_no_failure_of_the_handler(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lasts longer than a run waits: the message is handed back, and the breaker stays shut."""
    monkeypatch.setattr(patient_store, "WAIT_S", 0.0)
    app = await lab.open(breaker={"failures": 1, "probe_s": 3600.0})
    outage = Outage(app)

    @app.on("pay", retries=0)
    async def pay(ctx: Context) -> str:
        await ctx.heartbeat()
        return "paid"

    await lab.start(app)
    receipt = await app.send("pay")
    await after_calls(outage, 4)
    outage.is_over.set()
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert lab.task(receipt.id)["retry_count"] == 0


async def test_a_time_limit_that_passes_in_an_outage_is_no_failure(lab: Lab) -> None:
    app = await lab.open(breaker={"failures": 1, "probe_s": 3600.0})
    outage = Outage(app)

    @app.on("pay", retries=0, timeout_s=0.2)
    async def pay(ctx: Context) -> str:
        await ctx.heartbeat()
        return "paid"

    await lab.start(app)
    receipt = await app.send("pay")
    while "task.released" not in lab.kinds(receipt.id):  # noqa: ASYNC110 - another thread writes it
        await asyncio.sleep(0.01)
    outage.is_over.set()
    assert await lab.ends(receipt.id) == ["succeeded"]


async def test_neither_is_one_that_passes_while_the_store_hangs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives no answer at all, for longer than a worker waits before it is replaced."""
    monkeypatch.setattr(patient_store, "SLOW_S", 0.1)
    app = await lab.open(
        breaker={"failures": 1, "probe_s": 3600.0}, worker={"recycle_grace_s": 0.2}
    )
    effect_begin = app.store.effect_begin
    answers = asyncio.Event()

    async def hangs(*arguments: Any, **options: Any) -> Any:
        await answers.wait()
        return await effect_begin(*arguments, **options)

    app.store.effect_begin = hangs  # type: ignore[method-assign]
    charged: list[str] = []

    @app.on("pay", retries=0, timeout_s=0.3)
    async def pay(ctx: Context) -> Any:
        return await ctx.once("charge", lambda: charged.append("called"))

    looks: list[Any] = []
    stuck = Executor._stuck

    def seen(*of: Any) -> None:
        looks.append(of)
        stuck(*of)

    monkeypatch.setattr(Executor, "_stuck", seen)
    worker = await lab.start(app)
    receipt = await app.send("pay")
    while not looks:  # noqa: ASYNC110 - its grace passes
        await asyncio.sleep(0.01)
    assert not worker.recycle
    answers.set()
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert lab.task(receipt.id)["retry_count"] == 0
    assert charged == ["called"]


async def test_a_result_outlives_its_run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is cancelled while the result of its effect cannot be written: it is written later,
    however late, and the next attempt has it."""
    monkeypatch.setattr(patient_store, "WAIT_S", 0.0)
    app = await lab.open()
    outage = Outage(app)
    outage.is_over.set()
    charged: list[str] = []

    @app.on("pay", retries=0, timeout_s=0.2)
    async def pay(ctx: Context) -> Any:
        def effect() -> str:
            charged.append("called")
            outage.is_over.clear()
            return "paid"

        return await ctx.once("charge", effect)

    await lab.start(app)
    receipt = await app.send("pay")
    while "task.released" not in lab.kinds(receipt.id):  # noqa: ASYNC110 - another thread writes it
        await asyncio.sleep(0.01)
    outage.is_over.set()
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert charged == ["called"]
    assert lab.task(receipt.id)["result"] == b'"paid"'


async def test_a_plain_handler_that_waits_for_the_store_costs_no_worker(lab: Lab) -> None:
    """Past its time limit and its grace: only this process knows the result of its effect."""
    app = await lab.open(worker={"recycle_grace_s": 0.1})
    outage = Outage(app)
    outage.is_over.set()
    charged: list[str] = []

    @app.on("pay", retries=0, timeout_s=0.2)
    def pay(ctx: SyncContext) -> Any:
        def effect() -> str:
            charged.append("called")
            outage.is_over.clear()
            return "paid"

        return ctx.once("charge", effect)

    worker = await lab.start(app)
    receipt = await app.send("pay")
    while not charged:  # noqa: ASYNC110 - another thread writes it
        await asyncio.sleep(0.01)
    await after_calls(outage, outage.calls + 4)  # 0.05 + 0.1 + 0.2 + 0.4 s
    assert not worker.recycle
    outage.is_over.set()
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert charged == ["called"]


async def test_a_second_call_in_one_run_is_not_taken_for_a_repeat(lab: Lab) -> None:
    """The function was cut off, its run goes on and asks once more, and the store is away then."""
    app = await lab.open()
    outage = Outage(app)
    outage.is_over.set()
    charged: list[str] = []

    @app.on("pay", retries=0)
    async def pay(ctx: Context) -> Any:
        async def effect() -> None:
            charged.append("called")
            await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ctx.once("charge", effect)
        calls = outage.calls
        outage.is_over.clear()
        asked = asyncio.ensure_future(ctx.once("charge", effect, on_unknown="skip"))
        await after_calls(outage, calls + 2)
        outage.is_over.set()
        return await asked

    await lab.start(app)
    receipt = await app.send("pay")
    assert await lab.ends(receipt.id) == ["succeeded"]
    assert charged == ["called"]


async def test_only_the_run_that_waits_is_excused(lab: Lab) -> None:
    """Another one of the same worker runs out of time: that is a failure."""
    app = await lab.open()
    outage = Outage(app)

    @app.on("waits", retries=0)
    async def waits(ctx: Context) -> None:
        await ctx.heartbeat()

    @app.on("hangs", retries=0, timeout_s=0.2)
    async def hangs(ctx: Context) -> None:
        await asyncio.Event().wait()

    await lab.start(app)
    waiting = await app.send("waits")
    await after_calls(outage, 2)
    hanging = await app.send("hangs")
    assert await lab.ends(hanging.id) == ["failed"]
    outage.is_over.set()
    assert await lab.ends(waiting.id) == ["succeeded"]
