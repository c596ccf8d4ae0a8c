"""Children for suspects: as many as the setting allows, and no more."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.app import App
from holdfast.engine.context import Context
from holdfast.engine.executor import CallNext
from holdfast.services import SoloSpawner
from tests.integration.lab import PATIENCE_S, Lab

TARGET = f"{Path(__file__).with_name('isolated_app.py')}:app"
SUSPECTS = 6


@pytest.fixture
async def spawner_of() -> AsyncIterator[Callable[[App], SoloSpawner]]:
    """Makes a spawner that does not pause between two children, and ends its children."""
    made: list[SoloSpawner] = []

    def make(app: App) -> SoloSpawner:
        made.append(SoloSpawner(app, TARGET, pause_s=0.0))
        return made[-1]

    yield make
    for spawner in made:
        for child in spawner.children:
            child.kill()
            await asyncio.to_thread(child.wait)


async def with_suspects(lab: Lab, **settings: int) -> App:
    """An app whose store holds messages that crashed twice."""
    app = await lab.open(worker={"crash_budget": 2, **settings})

    @app.on("forever")
    async def forever(ctx: Context) -> None:
        await asyncio.Event().wait()

    ids = [(await app.send("forever")).id for _ in range(SUSPECTS)]
    worker = await lab.start(app)
    for message_id in ids:
        await lab.becomes(message_id, "running")
    await lab.stop(worker, 0.0)  # handed back
    with closing(sqlite3.connect(lab.path)) as conn:
        conn.execute("UPDATE queue_executions SET crashes = 2 WHERE status = 'ready'")
        conn.commit()
    return app


@pytest.mark.parametrize(("settings", "expected"), [({}, 4), ({"solo_children": 2}, 2)])
async def test_at_most_so_many_at_a_time(
    one_file: Lab,
    spawner_of: Callable[[App], SoloSpawner],
    settings: dict[str, int],
    expected: int,
) -> None:
    app = await with_suspects(one_file, **settings)
    spawner = spawner_of(app)
    worker = await app.store.register("spawner")
    for _ in range(6):
        await spawner.step(worker)
    assert len(spawner.children) == expected


# -- alone is alone -------------------------------------------------------------------------------


async def suspects_of(lab: Lab, app: App, *queues: str) -> None:
    """One message in each queue, which crashed its worker twice."""
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
    with closing(sqlite3.connect(lab.path)) as conn:
        conn.execute("UPDATE queue_executions SET crashes = 2 WHERE status = 'ready'")
        conn.commit()


async def test_the_next_suspect_waits_for_the_commit_of_the_last(
    one_file: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may kill the process: an innocent one whose end is not written yet would die with it."""
    app = await one_file.open(worker={"crash_budget": 2})
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
    worker = await one_file.start(app, solo=True)
    await asyncio.wait_for(committing.wait(), PATIENCE_S)
    for _ in range(3):  # whoever might begin another one has had its turn
        await app.store.next_due_s(app.subscriptions()[0])
    assert len(began) == 1
    go_on.set()
    await one_file.until(lambda: len(began) == 3)
    await one_file.stop(worker)


async def test_suspects_of_two_queues_do_not_run_side_by_side(one_file: Lab) -> None:
    app = await one_file.open(worker={"crash_budget": 2})
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
    worker = await one_file.start(app, solo=True)
    await one_file.until(lambda: worker.finished == 3)
    assert most == 1
    await one_file.stop(worker)
