"""Plain handlers run in threads, which nothing can stop: slots, drains, limits, lost leases."""

import asyncio
import contextlib
import threading

import pytest

from ackbone.engine.context import Context, SyncContext
from ackbone.engine.worker import Phase
from tests.integration.lab import Lab


async def test_a_thread_keeps_its_slot_until_it_returns(one_file: Lab) -> None:
    """It cannot be stopped: the claim stays, nobody else runs the message beside it."""
    app = await one_file.open(worker={"slots": 1, "recycle_grace_s": 60.0})
    release = threading.Event()
    running = asyncio.Event()
    loop = asyncio.get_running_loop()
    attempts: list[int] = []

    @app.on("slow", retries=1, timeout_s=0.05)
    def slow(ctx: SyncContext) -> str:
        attempts.append(ctx.attempt)
        loop.call_soon_threadsafe(running.set)
        if ctx.attempt == 1:
            release.wait(60)
        return "late" if ctx.attempt == 1 else "in time"

    worker = await one_file.start(app)
    receipt = await app.send("slow")
    await asyncio.wait_for(running.wait(), 20)
    (active,) = worker._executor.active
    await one_file.until(lambda: active.cause == "timeout", "its time is over")
    assert one_file.status(receipt.id) == "running"
    assert worker.running == 1
    release.set()
    assert await one_file.ends(receipt.id) == ["succeeded"]
    assert attempts == [1, 2], "what came after the timeout does not count"
    assert one_file.task(receipt.id)["result"] == b'"in time"'
    assert not worker.recycle


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_handler_that_cannot_be_ended_asks_for_a_new_process(
    one_file: Lab, kind: str
) -> None:
    app = await one_file.open(worker={"recycle_grace_s": 0.05})
    release = threading.Event()
    stubborn = asyncio.Event()

    def plain(ctx: SyncContext) -> None:
        release.wait(60)

    async def loops(ctx: Context) -> None:
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue

    app.on("slow", timeout_s=0.05)(loops if kind == "async" else plain)
    worker = await one_file.start(app)
    await app.send("slow")
    await asyncio.wait_for(worker.stopped.wait(), 20)
    assert worker.recycle
    release.set()
    stubborn.set()


async def test_drain_takes_the_result_of_a_thread_that_ends_meanwhile(one_file: Lab) -> None:
    app = await one_file.open()
    running = asyncio.Event()
    release = threading.Event()
    loop = asyncio.get_running_loop()

    @app.on("n", retries=0)
    def run(ctx: SyncContext) -> str:
        loop.call_soon_threadsafe(running.set)
        release.wait(60)
        return "whole"

    worker = await one_file.start(app)
    receipt = await app.send("n")
    await asyncio.wait_for(running.wait(), 20)
    draining = asyncio.create_task(one_file.stop(worker, 20.0))
    await one_file.until(lambda: worker.phase is Phase.DRAINING, "draining")
    release.set()
    await draining
    assert one_file.status(receipt.id) == "succeeded"


async def test_an_app_inside_another_program_waits_for_its_threads(
    one_file: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """Handed back, the message would run beside a thread that nothing can stop."""
    app = await one_file.open(worker={"shutdown_timeout_s": 0.05})
    running = asyncio.Event()
    release = threading.Event()
    loop = asyncio.get_running_loop()
    runs: list[int] = []

    @app.on("n", retries=0)
    def run(ctx: SyncContext) -> str:
        runs.append(ctx.attempt)
        loop.call_soon_threadsafe(running.set)
        release.wait(60)
        return "whole"

    working = asyncio.create_task(app.work())
    receipt = await app.send("n")
    await asyncio.wait_for(running.wait(), 20)
    working.cancel()
    await one_file.until(lambda: receipt.id in caplog.text, "that it waits is said")
    other = await one_file.open()
    looking = await other.store.register("other")
    found = await other.store.reap(worker=looking, lease_s=30.0, crash_budget=3)
    assert not found.workers, "it is alive, and so is its claim"
    assert not working.done()
    release.set()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    assert one_file.status(receipt.id) == "succeeded"
    assert runs == [1]


async def test_a_thread_past_its_time_is_not_waited_for(one_file: Lab) -> None:
    settings = {"shutdown_timeout_s": 0.05, "recycle_grace_s": 0.05}
    app = await one_file.open(worker=settings)
    release = threading.Event()

    @app.on("n", retries=0, timeout_s=0.05)
    def run(ctx: SyncContext) -> None:
        release.wait(60)

    await app.send("n")
    drained = await asyncio.wait_for(app.work(), 20)
    assert (drained.finished, drained.handed_back) == (0, 1)
    release.set()


async def test_many_threads_run_side_by_side(one_file: Lab) -> None:
    app = await one_file.open(worker={"slots": 8})
    together = threading.Barrier(8, timeout=30)

    @app.on("n")
    def run(ctx: SyncContext) -> int:
        return together.wait()

    ids = [(await app.send("n", n)).id for n in range(8)]
    await one_file.start(app)
    assert await one_file.ends(*ids) == ["succeeded"] * 8


async def test_threads_of_one_queue_hold_up_no_other(one_file: Lab) -> None:
    """Each queue has slots of its own: whoever waits for the thread of another one's run would
    see its time pass before it began."""
    app = await one_file.open(worker={"slots": 2, "recycle_grace_s": 60.0})
    release = threading.Event()
    held = threading.Barrier(3)

    @app.on("long", queue="a")
    def long(ctx: SyncContext) -> None:
        held.wait(30)
        release.wait(60)

    @app.on("short", queue="b", retries=0, timeout_s=1.0)
    def short(ctx: SyncContext) -> str:
        return "done"

    for _ in range(2):
        await app.send("long", queue="a")
    await one_file.start(app)
    await asyncio.to_thread(held.wait, 30)
    try:
        receipt = await app.send("short", queue="b")
        async with asyncio.timeout(20):
            await one_file.becomes(receipt.id, "succeeded")
    finally:
        release.set()


async def test_threads_of_a_lost_lease_hold_up_nobody(one_file: Lab) -> None:
    """They go on, and no one waits for them: their slots are free for what is claimed anew."""
    app = await one_file.open(worker={"slots": 1, "recycle_grace_s": 60.0})
    release = threading.Event()
    running = asyncio.Event()
    loop = asyncio.get_running_loop()

    @app.on("long")
    def long(ctx: SyncContext) -> None:
        loop.call_soon_threadsafe(running.set)
        release.wait(60)

    @app.on("short", retries=0, timeout_s=1.0)
    def short(ctx: SyncContext) -> str:
        return "done"

    worker = await one_file.start(app)
    await app.send("long")
    await asyncio.wait_for(running.wait(), 20)
    first = worker.worker.worker_id
    worker._lease_lost()
    await one_file.until(lambda: worker.worker.worker_id != first, "a new number")
    try:
        receipt = await app.send("short")
        async with asyncio.timeout(20):
            await one_file.becomes(receipt.id, "succeeded")
    finally:
        release.set()
