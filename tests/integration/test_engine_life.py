"""Workers come and go: drains, timeouts, outages of the store and of the broker."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ackbone.app import App
from ackbone.core.errors import StoreUnavailable
from ackbone.core.events import FINAL_EVENTS, RELEASED, RETRIED
from ackbone.core.store import Commit, Finished, Worker
from ackbone.engine.context import Context
from ackbone.engine.worker import Phase
from tests.faulty import Fault, FaultyBroker
from tests.integration.lab import MEMORY, PATIENCE_S, TWO_FILES, Lab
from tests.servers.stores import sqlite_store


async def test_drain_lets_runs_finish(lab: Lab) -> None:
    app = await lab.open()
    running = asyncio.Event()

    @app.on("n")
    async def run(ctx: Context) -> None:
        running.set()
        await asyncio.sleep(0.1)

    worker = await lab.start(app)
    ids = [(await app.send("n", n)).id for n in range(3)]
    await asyncio.wait_for(running.wait(), 20)
    drained = await lab.stop(worker)
    assert worker.phase is Phase.STOPPED
    assert drained.handed_back == 0
    assert "running" not in lab.statuses().values()
    await lab.start(app)
    assert await lab.ends(*ids) == ["succeeded"] * 3


@pytest.mark.parametrize("manner", ["lets go", "turns it into an error", "says nothing"])
async def test_drain_hands_back_what_does_not_finish(lab: Lab, manner: str) -> None:
    """No attempt is spent, however the handler takes its cancellation."""
    app = await lab.open()
    running = asyncio.Event()
    attempts: list[int] = []
    hang = True

    @app.on("n", retries=0)
    async def run(ctx: Context) -> str:
        attempts.append(ctx.attempt)
        running.set()
        if hang:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if manner == "turns it into an error":
                    raise RuntimeError("interrupted") from None
                if manner == "says nothing":
                    return "half"
                raise
        return "whole"

    worker = await lab.start(app)
    receipt = await app.send("n")
    await asyncio.wait_for(running.wait(), 20)
    drained = await lab.stop(worker, 0.0)
    assert drained.handed_back == 1
    hang = False
    await lab.start(app)
    assert await lab.ends(receipt.id) == ["succeeded"]
    if manner == "says nothing":
        assert lab.task(receipt.id)["result"] == b'"half"', "what it returned is its result"
        return
    assert attempts == [1, 1]
    assert lab.task(receipt.id)["crashes"] == 0
    assert RELEASED in lab.kinds(receipt.id)
    assert RETRIED not in lab.kinds(receipt.id)


async def test_drain_twice_and_without_a_start(one_file: Lab) -> None:
    app = await one_file.open()
    worker = app.worker()
    assert (await worker.drain()).handed_back == 0
    worker = await one_file.start(app)
    await asyncio.gather(worker.drain(), worker.drain())
    assert worker.phase is Phase.STOPPED
    await worker.drain()


async def test_workers_that_come_and_go_lose_nothing(lab: Lab) -> None:
    """Drained at any moment, also while a claim is on its way: nothing stays running for ever."""
    app = await lab.open(worker={"slots": 4})
    runs: list[int] = []

    @app.on("n")
    async def run(ctx: Context) -> None:
        await asyncio.sleep(0.001)
        runs.append(ctx.payload)

    ids = [(await app.send("n", n)).id for n in range(200)]
    for turn in range(25):
        worker = await lab.start(app)
        for _ in range(turn):
            await asyncio.sleep(0)
        await lab.stop(worker, 0.0)
        assert worker.running == 0
        assert "running" not in lab.statuses().values(), f"left behind in turn {turn}"
    await lab.start(app)
    assert set(await lab.ends(*ids)) == {"succeeded"}
    for message_id in ids:
        assert len(lab.finals(message_id)) == 1
        assert lab.task(message_id)["crashes"] == 0


async def test_timeout_of_an_async_handler(lab: Lab) -> None:
    app = await lab.open()
    cancelled: list[int] = []

    @app.on("slow", retries=1, timeout_s=0.05)
    async def slow(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(ctx.attempt)

    @app.on("fast", timeout_s=60)
    async def fast(ctx: Context) -> None:
        return None

    worker = await lab.start(app)
    receipt = await app.send("slow")
    neighbour = await app.send("fast")
    assert await lab.ends(receipt.id, neighbour.id) == ["failed", "succeeded"]
    assert cancelled == [1, 2]
    assert lab.letters()[0]["error"].startswith("HandlerTimeout")
    assert not worker.recycle


async def test_a_claim_that_is_answered_after_the_lease_was_lost_does_not_run(
    one_file: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would tell it any more that it runs beside its successor."""
    app = await one_file.open()
    tokens: list[int] = []

    @app.on("n")
    async def run(ctx: Context) -> None:
        tokens.append(ctx._run.token.worker_id)

    worker = app.worker()
    take = sqlite_store(app).take
    lost: list[int] = []

    async def late(*args: Any, **options: Any) -> Any:
        taken = await take(*args, **options)
        if taken.verdicts and not lost:
            lost.append(worker.worker.worker_id)
            worker._lease_lost()
        return taken

    monkeypatch.setattr(sqlite_store(app), "take", late)
    receipt = await app.send("n")
    await worker.begin()
    one_file._workers.append(worker)
    await one_file.until(lambda: worker.worker.worker_id not in (0, *lost) and lost, "again")
    await one_file.until(worker.is_idle, "it was dropped")
    assert tokens == []
    assert one_file.status(receipt.id) == "running", "the reaper's to give back"


class Outage:
    """A store that is away for a while: what it is asked raises, and nothing was done."""

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
        self.refused = 0
        self.away = False
        for name in methods:
            real = getattr(app.store, name)
            monkeypatch.setattr(app.store, name, self._wrapped(real))

    def _wrapped(self, real: Any) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            if self.away:
                self.refused += 1
                raise StoreUnavailable("away, by plan")
            return await real(*args, **options)

        return call


async def test_finishes_wait_for_the_store(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    app = await lab.open(worker={"slots": 4})
    outage = Outage(app, monkeypatch, "finish", "take", "claim", "claim_ready", "adopt_in_order")
    runs: list[int] = []

    @app.on("n")
    async def run(ctx: Context) -> int:
        outage.away = True
        runs.append(ctx.payload)
        return int(ctx.payload)

    ids = [(await app.send("n", n)).id for n in range(20)]
    worker = await lab.start(app)
    await lab.until(lambda: outage.refused >= 3, "the store was asked and was away")
    assert "succeeded" not in lab.statuses().values()
    assert len(runs) <= 12, "no more is claimed than there is room for"
    outage.away = False
    before = len(runs)

    async def back() -> None:
        while len(runs) < 20 or outage.away:
            outage.away = False
            await asyncio.sleep(0.001)

    keeping = asyncio.create_task(back())
    assert set(await lab.ends(*ids)) == {"succeeded"}
    keeping.cancel()
    assert sorted(runs) == list(range(20)), f"{before} ran before, none of them again"
    assert worker.failure is None


async def test_who_lost_its_lease_waits_for_the_store_to_register_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cost the lease was an outage, and the store comes back with pauses."""
    app = await lab.open()

    @app.on("n")
    async def run(ctx: Context) -> None:
        pass

    worker = await lab.start(app)
    first = worker.worker.worker_id
    outage = Outage(app, monkeypatch, "register")
    outage.away = True
    worker._lease_lost()
    await lab.until(lambda: outage.refused > 1 or worker.failure, "it asked again")
    outage.away = False
    await lab.until(lambda: worker.worker.worker_id != first or worker.failure, "a new number")
    assert worker.failure is None
    receipt = await app.send("n")
    assert await lab.ends(receipt.id) == ["succeeded"]


async def test_an_answer_that_got_lost_is_asked_for_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit was made and its answer lost: the repeat is told ALREADY, nothing is doubled."""
    app = await lab.open()
    real = app.store.finish
    answers: list[Sequence[Commit]] = []

    async def finish(batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        answers.append(await real(batch, worker=worker))
        if len(answers) == 1:
            raise StoreUnavailable("the answer got lost")
        return answers[-1]

    monkeypatch.setattr(app.store, "finish", finish)

    @app.on("n")
    async def run(ctx: Context) -> None:
        await ctx.reply("once")
        await ctx.send("child", queue="children")

    await lab.start(app)
    receipt = await app.send("n")
    await lab.until(lambda: len(answers) >= 2, "asked again")
    assert [list(answer) for answer in answers] == [[Commit.COMMITTED], [Commit.ALREADY]]
    assert lab.replies() == ["once"]
    assert len(lab.finals(receipt.id)) == 1


async def test_a_settler_that_fails_stops_its_worker(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no error of the store: what ended must not wait in silence for ever."""
    app = await lab.open()
    runs: list[str] = []

    async def fail(batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        raise KeyError("a mistake")

    @app.on("n")
    async def run(ctx: Context) -> None:
        runs.append(ctx.message.id)

    with monkeypatch.context() as mistaken:
        mistaken.setattr(app.store, "finish", fail)
        worker = await lab.start(app)
        receipt = await app.send("n")
        async with asyncio.timeout(PATIENCE_S):
            await worker.stopped.wait()
        assert isinstance(worker.failure, KeyError)
        assert lab.status(receipt.id) == "running"
        await lab.stop(worker)
    assert lab.status(receipt.id) in ("ready", "open")
    if app.store.holds("default"):  # elsewhere the broker has to miss its copy first
        await lab.start(app)
        assert await lab.ends(receipt.id) == ["succeeded"]
        assert len(runs) == 2


@pytest.fixture(params=[TWO_FILES, MEMORY])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def _with_faults(lab: Lab, app: App) -> FaultyBroker:
    faulty = FaultyBroker(app.broker)
    app.brokers.by_name["default"] = faulty
    return faulty


async def test_a_broker_that_fails_now_and_then_loses_nothing(
    home: Any, schema: Any, mode: str
) -> None:
    lab = Lab(home, mode, schema)
    app = await lab.open(worker={"slots": 4})
    runs: list[int] = []

    @app.on("n")
    async def run(ctx: Context) -> None:
        runs.append(ctx.payload)

    ids = [(await app.send("n", n)).id for n in range(40)]
    faulty = await _with_faults(lab, app)
    faulty.script("receive", Fault.RAISE_BEFORE, None, Fault.DUPLICATE, Fault.REORDER)
    faulty.script("settle", Fault.RAISE_BEFORE, None, Fault.RAISE_AFTER, Fault.RAISE_BEFORE)
    worker = await lab.start(app)
    try:
        assert set(await lab.ends(*ids)) == {"succeeded"}
        assert sorted(runs) == list(range(40))
        assert sum(faulty.faults.values()) >= 5, faulty.faults
        assert worker.failure is None
        kinds = lab.rows("SELECT event_type FROM event_log")
        assert sum(kind in FINAL_EVENTS for (kind,) in kinds) == 40
    finally:
        await lab.close()
