"""Children for suspects: as many as they need, and no more than the setting allows."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ackbone.app import App
from ackbone.core.store import Company, Worker
from ackbone.engine.context import Context
from ackbone.engine.wiring import CallNext
from ackbone.processes.suspects import Child, Warden
from tests.integration.lab import PATIENCE_S, Lab

TARGET = f"{Path(__file__).with_name('isolated_app.py')}:app"
SUSPECTS = 20


@pytest.fixture
async def warden_of() -> AsyncIterator[Callable[[App], Warden]]:
    """Makes a warden, and ends its children."""
    made: list[Warden] = []

    def make(app: App) -> Warden:
        made.append(Warden(app, TARGET))
        return made[-1]

    yield make
    for warden in made:
        for child in warden.children:
            child.process.kill()
            await asyncio.to_thread(child.process.wait)
        warden.close()


async def with_suspects(lab: Lab, crashes: int, **settings: int) -> App:
    """An app whose store holds messages that crashed."""
    app = await lab.open(target=TARGET, worker={"slots": SUSPECTS, **settings})

    @app.on("forever")
    async def forever(ctx: Context) -> None:
        await asyncio.Event().wait()

    ids = [(await app.send("forever")).id for _ in range(SUSPECTS)]
    worker = await lab.start(app)
    for message_id in ids:
        await lab.becomes(message_id, "running")
    await lab.stop(worker, 0.0)  # handed back
    _set_crashes(lab, crashes)
    return app


def _set_crashes(lab: Lab, crashes: int) -> None:
    with closing(sqlite3.connect(lab.path)) as conn:
        conn.execute("UPDATE queue_executions SET crashes = ? WHERE status = 'ready'", (crashes,))
        conn.commit()


@pytest.mark.parametrize(
    ("crashes", "settings", "expected"),
    [(2, {}, 3), (2, {"solo_children": 2}, 2), (3, {}, 13), (3, {"solo_children": 1}, 1)],
)
async def test_as_many_as_suspects_need(
    one_file: Lab,
    warden_of: Callable[[App], Warden],
    crashes: int,
    settings: dict[str, int],
    expected: int,
) -> None:
    app = await with_suspects(one_file, crashes, **settings)
    warden = warden_of(app)
    warden._spawn = lambda company, worker: _Quiet()  # type: ignore[method-assign]
    worker = await app.store.register("warden")
    for _ in range(4):
        await warden.step(worker)
    assert len(warden.children) == expected


async def test_none_for_suspects_of_a_paused_queue(
    one_file: Lab, warden_of: Callable[[App], Warden]
) -> None:
    """They would take nothing, and stay for as long as the queue is paused."""
    app = await with_suspects(one_file, 2)
    warden = warden_of(app)
    warden._spawn = lambda company, worker: _Quiet()  # type: ignore[method-assign]
    worker = await app.store.register("warden")
    async with app.storage.operations(app.store, by="somebody") as operations:
        await operations.pause("default")
        await warden.step(worker)
        assert (len(warden.children), warden.waiting.few) == (0, 0)
        await operations.unpause("default")
        await warden.step(worker)
    assert len(warden.children) == 3


class _Quiet:
    """A child that never takes anything."""

    pid = 1

    def poll(self) -> int | None:
        return None

    def send_signal(self, sig: int) -> None:
        return None

    def kill(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0


class _Hanging(_Quiet):
    """A child that stands still until it is killed."""

    pid = 3

    def __init__(self) -> None:
        self.killed = False

    def poll(self) -> int | None:
        return -9 if self.killed else None

    def kill(self) -> None:
        self.killed = True


async def test_a_child_that_gives_no_sign_of_life_is_killed_and_its_crash_counts(
    one_file: Lab, warden_of: Callable[[App], Warden]
) -> None:
    app = await with_suspects(one_file, 2, lease_s=3)
    warden = warden_of(app)
    warden._spawn = lambda company, worker: _Quiet()  # type: ignore[method-assign]
    worker = await app.store.register("warden")
    hanging = _Hanging()
    message_id = await run_in(app, warden, worker, hanging)
    await step_until(one_file, warden, worker, message_id)
    assert hanging.killed
    assert one_file.task(message_id)["crashes"] == 3


async def run_in(app: App, warden: Warden, worker: Worker, process: _Quiet) -> str:
    """A suspect runs in a child of the warden, which is this process. Returns its id."""
    child = await app.store.register(app.worker_name(process.pid), parent=worker.as_parent)
    (verdict,) = await app.store.claim_ready(
        app.subscriptions()[0], limit=1, worker=child, company=Company.FEW
    )
    assert verdict.run is not None
    warden.children.append(Child(process, Company.FEW, app.clock.monotonic()))
    return verdict.run.message.id


async def step_until(lab: Lab, warden: Warden, worker: Worker, message_id: str) -> None:
    """The warden does its work until the message runs no more."""
    store, clock = warden._app.store, warden._app.clock
    end = clock.monotonic() + PATIENCE_S
    while lab.status(message_id) == "running":
        assert clock.monotonic() < end, "nobody takes it back"
        store.beat(worker)
        await warden.step(worker)
        await asyncio.sleep(0.05)


class _Ended(_Quiet):
    """A child that has ended."""

    pid = 2
    code = 9

    def poll(self) -> int | None:
        return self.code


class _Refused(_Ended):
    """A child that found no free connection."""

    code = os.EX_UNAVAILABLE


async def test_children_that_cannot_come_up_are_not_started_without_end(
    one_file: Lab, warden_of: Callable[[App], Warden], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await with_suspects(one_file, 2)
    warden, started = warden_of(app), 0

    def spawn(company: Company, worker: Worker) -> _Refused:
        nonlocal started
        started += 1
        return _Refused()

    monkeypatch.setattr(warden, "_spawn", spawn)
    worker = await app.store.register("warden")
    for _ in range(5):
        await warden.step(worker)
    assert started == 3


async def test_the_crash_of_a_child_counts_though_its_sign_of_life_is_kept(
    one_file: Lab, warden_of: Callable[[App], Warden]
) -> None:
    """A program that it forked has its files open, and outlives it."""
    app = await with_suspects(one_file, 2, lease_s=3)
    warden = warden_of(app)
    warden._spawn = lambda company, worker: _Quiet()  # type: ignore[method-assign]
    worker = await app.store.register("warden")
    message_id = await run_in(app, warden, worker, _Ended())
    await step_until(one_file, warden, worker, message_id)
    assert one_file.task(message_id)["crashes"] == 3


# -- alone is alone -------------------------------------------------------------------------------


async def suspects_of(lab: Lab, app: App, *queues: str) -> None:
    """One message in each queue, which must run alone."""
    ids = [(await app.send("suspect", queue=queue)).id for queue in queues]
    held = asyncio.Event()

    @app.middleware
    async def hold(ctx: Context, call_next: CallNext) -> Any:
        if not released:
            await held.wait()
        return await call_next(ctx)

    released: list[bool] = []
    worker = await lab.start(app)
    for message_id in ids:
        await lab.becomes(message_id, "running")
    await lab.stop(worker, 0.0)
    released.append(True)
    _set_crashes(lab, 3)


async def test_the_next_suspect_waits_for_the_commit_of_the_last(
    one_file: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may kill the process: an innocent one whose end is not written yet would die with it."""
    app = await one_file.open(target=TARGET)
    began: list[str] = []

    @app.on("suspect", queue="q")
    async def suspect(ctx: Context) -> None:
        began.append(ctx.message.id)

    await suspects_of(one_file, app, "q", "q", "q")
    committing, go_on = asyncio.Event(), asyncio.Event()
    finish = app.store.finish

    async def slow_finish(batch: Any, *, worker: Any) -> Any:
        committing.set()
        await go_on.wait()
        return await finish(batch, worker=worker)

    monkeypatch.setattr(app.store, "finish", slow_finish)
    worker = await one_file.start(app, company=Company.NONE)
    await asyncio.wait_for(committing.wait(), PATIENCE_S)
    for _ in range(3):  # whoever might begin another one has had its turn
        await app.store.next_due_s(app.subscriptions()[0])
    assert len(began) == 1
    go_on.set()
    await one_file.until(lambda: len(began) == 3)
    await one_file.stop(worker)


async def test_suspects_of_two_queues_do_not_run_side_by_side(one_file: Lab) -> None:
    app = await one_file.open(target=TARGET)
    running: set[str] = set()
    most = 0

    async def suspect(ctx: Context) -> None:
        nonlocal most
        running.add(ctx.message.id)
        most = max(most, len(running))
        await app.store.next_due_s(app.subscriptions()[0])  # time for another one to begin
        running.discard(ctx.message.id)

    queues = ("a", "b", "c")
    for queue in queues:
        app.on("suspect", queue=queue)(suspect)
    await suspects_of(one_file, app, *queues)
    worker = await one_file.start(app, company=Company.NONE)
    await one_file.until(lambda: worker.finished == 3)
    assert most == 1
    await one_file.stop(worker)
