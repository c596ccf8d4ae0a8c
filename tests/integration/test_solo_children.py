"""Children for suspects: as many as the setting allows, and no more."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.app import App
from holdfast.engine.context import Context
from holdfast.services import SoloSpawner
from tests.integration.lab import Lab

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
