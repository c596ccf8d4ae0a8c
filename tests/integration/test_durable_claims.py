"""An answer that lets a broker's copy go is on disk before it is told; a run need not be."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.message import Message
from ackbone.core.notices import Notices
from ackbone.core.outcome import Done, Released
from ackbone.core.quota import Limits, Quota
from ackbone.core.store import Answer, Candidate, Finished, Run, Store, Verdict, Worker
from ackbone.engine.decoder import decoder
from ackbone.sqlitefile.wal import witnessed
from ackbone.store.postgres.migrate import ensure_schema as ensure_postgres
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.postgres.verify import verify_ledger
from ackbone.store.sqlite.store import SqliteStore
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("postgres")
SUB = Subscription(name="s", queue="q", ordered=False)
PATIENT = "wal_writer_delay=10s"
"""The longest pause that the server allows. Its default writes commits out five times a second."""
LOSSES_TRIED = 8
"""The server may write a commit out just before it is killed, so one survivor proves nothing."""
TABLES = {
    "queue_executions": "message_id, status, held, body",
    "dead_letters": "message_id, reason, body",
    "outbox": "queue_name, body",
}
_tags = itertools.count(1)


class Desk:
    """A store, one worker of its, and what is in its tables."""

    def __init__(self, store: Store, worker: Worker) -> None:
        self.store = store
        self.worker = worker

    def look(self) -> dict[str, list[Any]]:
        return {
            table: sorted(self.rows(f"SELECT {columns} FROM {table}"), key=repr)
            for table, columns in TABLES.items()
        }

    def rows(self, sql: str) -> list[Any]:
        raise NotImplementedError

    def change(self, sql: str) -> None:
        raise NotImplementedError

    async def claim(self, *batch: Candidate, worker: Worker | None = None) -> Sequence[Verdict]:
        return await self.store.claim(SUB, batch, worker=worker or self.worker)

    async def run(self, candidate: Candidate) -> Run:
        (verdict,) = await self.claim(candidate)
        assert verdict.run is not None
        return verdict.run

    async def end(self, run: Run, outcome: Any) -> None:
        await self.store.finish([Finished(run=run, outcome=outcome)], worker=self.worker)

    async def is_on_disk(self, claim: Callable[[], Any]) -> bool:
        """Does what this claim wrote outlive the database, if that fails right afterwards?"""
        raise NotImplementedError

    async def loses_a_run(self) -> bool:
        """Is the claim of a run lost if the database fails right afterwards?"""
        for number in range(LOSSES_TRIED):
            if not await self.is_on_disk(partial(self.claim, copy(f"lost{number}"))):
                return True
        return False


class SqliteDesk(Desk):
    def _connected(self) -> sqlite3.Connection:
        assert isinstance(self.store, SqliteStore)
        return sqlite3.connect(self.store.path)

    def rows(self, sql: str) -> list[Any]:
        with closing(self._connected()) as conn:
            return conn.execute(sql).fetchall()

    def change(self, sql: str) -> None:
        with closing(self._connected()) as conn, conn:
            conn.execute(sql)

    async def is_on_disk(self, claim: Callable[[], Any]) -> bool:
        """No process can be cut off from what it has written: a synced commit is counted."""
        assert isinstance(self.store, SqliteStore)
        before = witnessed(self.store.path)
        await claim()
        return witnessed(self.store.path) != before


class PostgresDesk(Desk):
    def __init__(self, store: Store, worker: Worker, server: PostgresServer, url: str) -> None:
        super().__init__(store, worker)
        self._server = server
        self.url = url

    def rows(self, sql: str) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as conn:
            return conn.execute(sql).fetchall()

    def change(self, sql: str) -> None:
        with psycopg.connect(self.url) as conn:
            conn.execute(sql)

    async def is_on_disk(self, claim: Callable[[], Any]) -> bool:
        await claim()
        said = self.look()
        self._server.restart()
        return self.look() == said


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    server = PostgresServer(PATIENT)
    server.start()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgres"])
async def desk(request: pytest.FixtureRequest, home: Path, schema: Path) -> AsyncIterator[Desk]:
    notices = Notices(results="results", on_ack=True)
    store: Store
    if request.param == "sqlite":
        path = home / "store.db"
        shutil.copy(schema, path)
        store = SqliteStore(path, notices=lambda _: notices)
        await store.open()
        yield SqliteDesk(store, await store.register("test"))
    else:
        server: PostgresServer = request.getfixturevalue("server")
        url = server.url(server.new_database())
        ensure_postgres(url)
        store = PostgresStore(url, notices=lambda _: notices)
        await store.open()
        yield PostgresDesk(store, await store.register("test"), server, url)
    await store.close()


def copy(message_id: str, **fields: Any) -> Candidate:
    message = Message(id=message_id, type="t", **fields)
    body, headers = CODECS["standard"].encode(message)
    return decoder(SUB)(Delivery(body=body, headers=headers, tag=next(_tags), identity=message_id))


def broken() -> Candidate:
    return decoder(SUB)(Delivery(body=b"\xff{", headers={}, tag=next(_tags), identity="broken"))


async def busy_key(desk: Desk) -> Candidate:
    await desk.run(copy("first", idempotency_key="k"))
    return copy("m", idempotency_key="k")


async def used_up_quota(desk: Desk) -> Candidate:
    desk.store.quotas_of = lambda run: [Quota(name="none", window_s=3600, limits=Limits(runs=0))]
    return copy("m")


async def suspect(desk: Desk) -> Candidate:
    """It crashed two workers, and its copy comes back."""
    await desk.end(await desk.run(copy("m")), Released())
    desk.change("UPDATE queue_executions SET crashes = 2")
    return copy("m")


async def runs_elsewhere(desk: Desk) -> Candidate:
    other = await desk.store.register("other")
    await desk.claim(copy("m"), worker=other)
    return copy("m")


async def done_key(desk: Desk) -> Candidate:
    await desk.end(await desk.run(copy("first", idempotency_key="k")), Done())
    return copy("m", idempotency_key="k")


async def over_time(desk: Desk) -> Candidate:
    return copy("m", expires_at=datetime.now(UTC) - timedelta(seconds=1))


async def undecodable(desk: Desk) -> Candidate:
    return broken()


async def other_payload(desk: Desk) -> Candidate:
    await desk.run(copy("m", payload=1))
    return copy("m", payload=2)


async def succeeded(desk: Desk) -> Candidate:
    """Its end is told again, by a row of the outbox: nobody may have heard of it."""
    await desk.end(await desk.run(copy("m")), Done())
    return copy("m")


async def held_by_the_store(desk: Desk) -> Candidate:
    await desk.claim(await runs_elsewhere(desk))
    return copy("m")


@pytest.mark.parametrize(
    ("before", "answer"),
    [
        (busy_key, Answer.WAITING),
        (used_up_quota, Answer.WAITING),
        (suspect, Answer.WAITING),
        (runs_elsewhere, Answer.ADOPTED),
        (held_by_the_store, Answer.KNOWN),
        (done_key, Answer.DUPLICATE),
        (over_time, Answer.EXPIRED),
        (undecodable, Answer.DEAD),
        (other_payload, Answer.DEAD),
        (succeeded, Answer.FINAL),
    ],
)
async def test_what_may_be_acknowledged_is_on_disk(
    desk: Desk, before: Callable[[Desk], Any], answer: Answer
) -> None:
    candidate = await before(desk)
    verdicts: list[Verdict] = []

    async def claim() -> None:
        verdicts.extend(await desk.claim(candidate))

    kept = await desk.is_on_disk(claim)
    assert [verdict.answer for verdict in verdicts] == [answer]
    assert kept, f"{answer} was told, and is not on disk"


async def test_one_that_may_be_acknowledged_is_enough(desk: Desk) -> None:
    batch = [copy("a"), broken(), copy("b")]
    verdicts: list[Verdict] = []

    async def claim() -> None:
        verdicts.extend(await desk.claim(*batch))

    assert await desk.is_on_disk(claim)
    assert [v.answer for v in verdicts] == [Answer.RUN, Answer.DEAD, Answer.RUN]
    assert [row[0] for row in desk.look()["queue_executions"]] == ["a", "b", "broken"]


async def test_runs_wait_for_no_disk(desk: Desk) -> None:
    """Their messages are still with the broker: a lost claim of theirs only runs again."""
    assert await desk.loses_a_run()


@pytest.mark.parametrize("desk", ["postgres"], indirect=True)
async def test_chains_go_on_after_a_claim_that_was_synced_and_one_that_was_lost(
    desk: Desk, home: Path
) -> None:
    """What counts as sure of a chain is what a crash leaves of it."""
    assert isinstance(desk, PostgresDesk)
    await desk.claim(broken())
    assert await desk.loses_a_run()
    await desk.end(await desk.run(copy("b")), Done())
    report = verify_ledger(desk.url, b"k" * 32, home / "ledger.anchors")
    assert report.ok, report
