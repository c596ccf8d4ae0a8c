"""A crash of the database takes a claim back while its run goes on, and the same worker is granted
it once more: the run is not begun beside itself, and one of the two commits."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from ackbone.app import App
from ackbone.core.store import Commit, Finished, Worker
from ackbone.engine.context import Context
from ackbone.engine.worker import EngineWorker
from ackbone.store.sqlite.store import SqliteStore
from tests.integration.lab import MEMORY, PATIENCE_S, Lab
from tests.servers.stores import sqlite_store


@pytest.fixture
async def lab(home: Path, schema: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setattr(SqliteStore, "forgets_claims", True)
    lab = Lab(home, MEMORY, schema)
    yield lab
    await lab.close()


class Scene:
    """A run that waits for us, and a store that forgot its claim."""

    app: App
    worker: EngineWorker
    message_id: str

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.go_on = asyncio.Event()
        self.runs = 0

    async def begin(self) -> None:
        self.app = app = await self.lab.open()
        began = asyncio.Event()

        @app.on("n")
        async def run(ctx: Context) -> int:
            self.runs += 1
            began.set()
            await self.go_on.wait()
            return self.runs

        self.worker = await self.lab.start(app)
        self.message_id = (await app.send("n", idempotency_key="k")).id
        await asyncio.wait_for(began.wait(), PATIENCE_S)

    async def forget(self) -> None:
        """What an unsynced transaction leaves behind after a crash: nothing."""

        def undone(conn: sqlite3.Connection) -> None:
            conn.execute("DELETE FROM queue_executions")
            conn.execute("DELETE FROM idempotency_keys")

        await sqlite_store(self.app).file.write(undone)

    async def granted_again(self) -> None:
        await self.app.send("n", id=self.message_id, idempotency_key="k")
        repeated = self.worker._flow.repeated
        assert repeated is not None
        await self.lab.until(lambda: any(repeated._second.values()), "the claim is granted again")

    async def ended(self) -> None:
        assert await self.lab.ends(self.message_id) == ["succeeded"]
        await self.lab.until(self.worker.is_idle, "all is told")
        assert len(self.lab.finals(self.message_id)) == 1
        assert self.worker._flow.slots["default"].taken == 0
        assert self.worker._flow.repeated is not None
        assert self.worker._flow.repeated._second == {}


async def test_the_first_run_goes_on_and_commits(lab: Lab) -> None:
    scene = Scene(lab)
    await scene.begin()
    await scene.forget()
    await scene.granted_again()
    scene.go_on.set()
    await scene.ended()
    assert scene.runs == 1


async def test_if_the_first_one_is_refused_the_second_begins(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store judged the first run before it granted the claim again; both answers meet here."""
    scene = Scene(lab)
    await scene.begin()
    await scene.forget()
    real = scene.app.store.finish
    answers: list[Sequence[Commit]] = []

    async def finish(batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        answers.append(await real(batch, worker=worker))
        if len(answers) == 1:
            await scene.granted_again()
        return answers[-1]

    monkeypatch.setattr(scene.app.store, "finish", finish)
    scene.go_on.set()
    await scene.ended()
    assert [list(each) for each in answers] == [[Commit.FENCED], [Commit.COMMITTED]]
    assert scene.runs == 2
