"""A duplicate ends without a run; the conversation that it stood in goes on in the same commit."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ackbone.app import App
from ackbone.config import load_config
from ackbone.core.clock import to_us
from ackbone.core.outcome import Done
from ackbone.core.store import Finished, Run, Worker
from ackbone.engine.decoder import decoder
from tests.servers.stores import sqlite_store


async def take(app: App, worker: Worker) -> list[Run]:
    (sub,) = app.subscriptions()
    taken = await sqlite_store(app).take(sub, decoder(sub, max_bytes=None), limit=10, worker=worker)
    return [verdict.run for verdict in taken.verdicts if verdict.run is not None]


async def finish(app: App, runs: Sequence[Run], worker: Worker) -> None:
    done = [
        Finished(run=run, outcome=Done(), finished_at_us=to_us(run.message.created_at))
        for run in runs
    ]
    await app.store.finish(done, worker=worker)


def statuses(home: Path) -> dict[str, str]:
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        return dict(conn.execute("SELECT message_id, status FROM queue_executions"))


async def test_one_that_waited_for_its_key_lets_its_conversation_go_on(home: Path) -> None:
    async with App(load_config(environ={}, overrides={"home": str(home)})) as app:
        worker = await app.store.register("test")
        await app.send("chat", id="first", idempotency_key="k")
        runs = await take(app, worker)
        await app.send("chat", id="copy", idempotency_key="k", ordering_key="lane")
        await app.send("chat", id="next", ordering_key="lane")
        assert await take(app, worker) == []
        assert statuses(home) == {"first": "running", "copy": "waiting_key", "next": "queued"}
        await finish(app, runs, worker)
        assert statuses(home) == {"first": "succeeded", "copy": "duplicate", "next": "ready"}


async def test_one_that_ends_at_its_claim_lets_its_conversation_go_on(home: Path) -> None:
    async with App(load_config(environ={}, overrides={"home": str(home)})) as app:
        worker = await app.store.register("test")
        await app.send("chat", id="first", idempotency_key="k")
        await finish(app, await take(app, worker), worker)
        await app.send("chat", id="copy", idempotency_key="k", ordering_key="lane")
        await app.send("chat", id="next", ordering_key="lane")
        woken = app.store.subscribe()
        woken.clear()
        await take(app, worker)
        assert statuses(home) == {"first": "succeeded", "copy": "duplicate", "next": "ready"}
        await woken.wait()  # a fetcher that saw only the duplicate is told to look again
        app.store.unsubscribe(woken)
