"""What the rows of waiting messages hold, in both databases."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.message import Message
from ackbone.core.outcome import Done, Outcome, Park
from ackbone.core.store import Candidate, Commit, Finished, Run, Store, Worker
from ackbone.engine.decoder import decoder
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore

SUB = Subscription(name="s", queue="q", ordered=True)
_tags = itertools.count()


def sent(name: str, **fields: Any) -> Candidate:
    """A broker's copy: "a1" is the first message of conversation a."""
    message = Message(id=name, type="t", ordering_key=name[0], **fields)
    body, headers = CODECS["standard"].encode(message)
    return decoder(SUB)(Delivery(body=body, headers=headers, tag=next(_tags), identity=name))


class Room:
    """A store with one worker, and the rows of its tasks."""

    def __init__(self, store: Store, worker: Worker, where: Path | str) -> None:
        self.store = store
        self.worker = worker
        self._where = where

    def sql(self, statement: str) -> list[Any]:
        if isinstance(self._where, Path):
            with closing(sqlite3.connect(self._where)) as conn, conn:
                return conn.execute(statement).fetchall()
        with psycopg.connect(self._where) as server:
            found = server.execute(statement)
            return found.fetchall() if found.description else []

    def statuses(self) -> dict[str, str]:
        return dict(self.sql("SELECT message_id, status FROM queue_executions"))

    async def adopt(self, *batch: Candidate) -> None:
        assert await self.store.adopt_in_order(SUB, batch, worker=self.worker) is not None

    async def ready(self) -> dict[str, Run]:
        found = await self.store.claim_ready(SUB, limit=10, worker=self.worker)
        return {each.run.message.id: each.run for each in found if each.run is not None}

    async def finish(self, run: Run, outcome: Outcome, result: bytes | None = None) -> None:
        end = Finished(run=run, outcome=outcome, result=result)
        assert list(await self.store.finish([end], worker=self.worker)) == [Commit.COMMITTED]


@pytest.fixture(
    params=["sqlite", pytest.param("postgres", marks=pytest.mark.xdist_group("postgres"))]
)
async def room(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[Room]:
    store: SqliteStore | PostgresStore
    where: Path | str
    if request.param == "sqlite":
        where = home / "ackbone.db"
        ensure_schema(where)
        store = SqliteStore(where, queue=None)
    else:
        where = str(request.getfixturevalue("postgres_url"))
        store = PostgresStore(where)
    await store.open()
    yield Room(store, await store.register("worker"), where)
    await store.close()


async def test_only_the_head_of_a_conversation_is_ready(room: Room) -> None:
    """The search for work would walk over the others each time."""
    await room.adopt(sent("a1"), sent("a2"), sent("b1"), sent("c1"))
    assert room.statuses() == {"a1": "ready", "a2": "queued", "b1": "ready", "c1": "ready"}
    runs = await room.ready()
    await room.finish(runs["a1"], Park("k", "r"))
    await room.finish(runs["b1"], Park("k", "r"))
    await room.finish(runs["c1"], Done())
    await room.adopt(sent("b2"), sent("c2"))
    statuses = room.statuses()
    assert (statuses["a1"], statuses["a2"]) == ("parked", "queued")
    assert (statuses["b1"], statuses["b2"]) == ("parked", "queued")
    assert (statuses["c1"], statuses["c2"]) == ("succeeded", "ready")


async def test_nothing_overtakes_the_head_of_its_conversation(room: Room) -> None:
    """Whatever its own row says."""
    await room.adopt(sent("a1"), sent("a2"), sent("b1"))
    room.sql("UPDATE queue_executions SET status = 'ready' WHERE message_id = 'a2'")
    runs = await room.ready()
    assert sorted(runs) == ["a1", "b1"]
    assert await room.ready() == {}
    await room.finish(runs["a1"], Done())
    assert list(await room.ready()) == ["a2"]


async def test_duplicates_have_the_result_of_the_first(room: Room) -> None:
    """One that waited for the end of the first, and one that came after it."""
    await room.adopt(sent("a1", idempotency_key="k"))
    runs = await room.ready()
    await room.adopt(sent("b1", idempotency_key="k"))
    assert await room.ready() == {}
    assert room.statuses() == {"a1": "running", "b1": "waiting_key"}
    await room.finish(runs["a1"], Done(), result=b"7")
    await room.adopt(sent("c1", idempotency_key="k"))
    assert await room.ready() == {}
    found = room.sql("SELECT message_id, status, result FROM queue_executions ORDER BY message_id")
    ends = {name: (status, bytes(result)) for name, status, result in found}
    again = ("duplicate", b"7")
    assert ends == {"a1": ("succeeded", b"7"), "b1": again, "c1": again}
