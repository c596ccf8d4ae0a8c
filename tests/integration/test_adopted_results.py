"""Results of tasks whose copy at the broker is gone before they end: nobody else will tell."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.message import Message
from ackbone.core.notices import Notices
from ackbone.core.outcome import Done
from ackbone.core.store import Answer, Candidate, Commit, Finished, Reply, Run, Store
from ackbone.engine.decoder import decoder
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore

TO = Notices(results="results", on_ack=True)
SUB = Subscription(name="s", queue="q", ordered=False)
_tags = itertools.count()


def copy_of(message: Message) -> Candidate:
    body, headers = CODECS["standard"].encode(message)
    return decoder(SUB)(Delivery(body=body, headers=headers, tag=next(_tags), identity=message.id))


def done(run: Run) -> Finished:
    return Finished(run=run, outcome=Done(), result=b"1", told_on_ack=run.delivery is not None)


class Room:
    """A store, and what stands in its outbox."""

    def __init__(self, store: Store, where: Path | str) -> None:
        self.store = store
        self._where = where

    def to_be_told(self) -> list[str]:
        asked = "SELECT message_id FROM outbox WHERE queue_name = 'results' ORDER BY message_id"
        found: list[Any]
        if isinstance(self._where, Path):
            with closing(sqlite3.connect(self._where)) as conn:
                found = conn.execute(asked).fetchall()
        else:
            with psycopg.connect(self._where) as server:
                found = server.execute(asked).fetchall()
        return [name for (name,) in found]


@pytest.fixture(
    params=["sqlite", pytest.param("postgres", marks=pytest.mark.xdist_group("postgres"))]
)
async def room(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[Room]:
    store: SqliteStore | PostgresStore
    where: Path | str
    if request.param == "sqlite":
        where = home / "ackbone.db"
        ensure_schema(where)
        store = SqliteStore(where, queue=None, notices=lambda name: TO)
    else:
        where = str(request.getfixturevalue("postgres_url"))
        store = PostgresStore(where, notices=lambda name: TO)
    await store.open()
    yield Room(store, where)
    await store.close()


async def test_a_success_is_told_by_the_outbox_where_its_copy_was_adopted(room: Room) -> None:
    """Another worker missed us, took the copy over and acknowledged it. Then we commit, and die."""
    store = room.store
    messages = [Message(id=f"m{n}", type="t") for n in range(20)]
    worker, other = await store.register("first"), await store.register("other")
    verdicts = await store.claim(SUB, [copy_of(each) for each in messages], worker=worker)
    runs = [verdict.run for verdict in verdicts if verdict.run is not None]
    (again,) = await store.claim(SUB, [copy_of(messages[3])], worker=other)
    assert again.answer is Answer.ADOPTED
    commits = await store.finish([done(run) for run in runs], worker=worker)
    assert list(commits) == [Commit.COMMITTED] * 20
    assert room.to_be_told() == ["m3"], "of the others their acknowledgement tells"


async def test_a_success_that_could_not_be_stored_is_told_as_the_failure_that_it_became(
    room: Room,
) -> None:
    """Its acknowledgement would tell of a success: the outbox tells, and the store says so."""
    store, worker = room.store, await room.store.register("first")
    messages = [Message(id=f"m{n}", type="t") for n in range(4)]
    verdicts = await store.claim(SUB, [copy_of(each) for each in messages], worker=worker)
    ends = [done(verdict.run) for verdict in verdicts if verdict.run is not None]
    reply = Reply(channel="no text \ud800", recipient="ann", content="hi")
    ends[2] = msgspec.structs.replace(ends[2], replies=[reply])
    first, buried, again = Commit.COMMITTED, Commit.BURIED, Commit.ALREADY
    assert list(await store.finish(ends, worker=worker)) == [first, first, buried, first]
    assert list(await store.finish(ends, worker=worker)) == [again, again, buried, again]
    assert room.to_be_told() == ["m2"]
