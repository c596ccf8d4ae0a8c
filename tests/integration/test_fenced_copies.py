"""A run that lost its claim writes nothing; its broker copy goes back at once, and is known."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ackbone.app import App
from ackbone.core.broker import Inspectable
from ackbone.engine.context import Context
from ackbone.engine.worker import EngineWorker
from tests.integration.lab import MEMORY, PATIENCE_S, TWO_FILES, Lab
from tests.servers.stores import sqlite_store


class Scene:
    """A worker whose run is under way, and that was declared dead meanwhile."""

    app: App
    worker: EngineWorker
    message_id: str

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.go_on = asyncio.Event()
        self.attempts: list[int] = []

    async def begin(self) -> None:
        lab = self.lab
        self.app = app = await lab.open()
        began = asyncio.Event()

        @app.on("n", retries=0)
        async def run(ctx: Context) -> int:
            self.attempts.append(ctx.attempt)
            began.set()
            if ctx.attempt == 1:
                await self.go_on.wait()
            return ctx.attempt

        self.worker = await lab.start(app)
        self.message_id = (await app.send("n")).id
        await asyncio.wait_for(began.wait(), PATIENCE_S)
        other = await app.store.register("another worker")
        # Every beat is older than that: to the other one this worker stands still.
        found = await app.store.reap(worker=other, lease_s=1e-9, crash_budget=3)
        assert self.worker.worker.worker_id in found.workers
        assert lab.status(self.message_id) == "open", "the broker is to bring the copy again"

    def learn(self) -> None:
        """What the lease's thread calls when it finds its worker declared dead."""
        self.worker._lease_lost()

    async def copies_are_gone(self) -> None:
        assert isinstance(self.app.broker, Inspectable)
        async with asyncio.timeout(PATIENCE_S):
            while any(q.ready or q.in_flight for q in await self.app.broker.stats()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture(params=[TWO_FILES, MEMORY])
async def scene(request: pytest.FixtureRequest, home: Path, schema: Path) -> AsyncIterator[Scene]:
    """With a broker that is not in the store's file."""
    lab = Lab(home, request.param, schema)
    scene = Scene(lab)
    await scene.begin()
    yield scene
    await lab.close()


async def runs_again(scene: Scene) -> None:
    assert await scene.lab.ends(scene.message_id) == ["succeeded"]
    task = scene.lab.task(scene.message_id)
    assert (task["attempt"], task["crashes"]) == (2, 1)
    assert task["result"] == b"2"
    assert scene.attempts == [1, 2]
    await scene.copies_are_gone()


async def test_of_a_result_that_is_refused(scene: Scene) -> None:
    """The run ends before its worker knows of its death."""
    scene.go_on.set()
    await scene.lab.until(scene.worker.is_idle, "its result was refused")
    scene.learn()
    await runs_again(scene)


async def test_of_a_run_that_ends_with_its_workers_lease(scene: Scene) -> None:
    scene.learn()
    await runs_again(scene)


async def test_of_a_message_that_ended_elsewhere(scene: Scene) -> None:
    """It comes back, is recognised as final, and is acknowledged without a second run."""
    end = "UPDATE queue_executions SET status = 'succeeded', epoch = epoch + 1"
    await sqlite_store(scene.app).file.write(lambda conn: conn.execute(end))
    scene.learn()
    await scene.copies_are_gone()
    assert scene.attempts == [1]
