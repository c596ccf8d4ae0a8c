"""The file and its writer thread, where things go wrong."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Outgoing, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.errors import StoreFull, StoreUnavailable
from ackbone.core.message import Message
from ackbone.core.outcome import Done, Retry
from ackbone.core.store import Finished, Worker
from ackbone.engine.decoder import decoder
from ackbone.sqlitefile.file import SqliteFile, close_file, open_file
from ackbone.sqlitefile.timebase import TimeBase
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from ackbone.store.sqlite.verify import verify_ledger
from ackbone.testing.clock import FakeClock

SUB = Subscription(name="jobs", queue="jobs")


@pytest.fixture
def database(home: Path) -> Path:
    path = home / "ackbone.db"
    ensure_schema(path)
    return path


class Bench:
    """Queue and store on one file, with a clock that the test moves."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.queue = SqliteBroker(path, self.clock)
        self.store = SqliteStore(path, queue=self.queue, clock=self.clock)
        self.decode = decoder(SUB)
        self.worker = Worker(worker_id=0)

    async def take(self, limit: int = 10) -> list[str]:
        taken = await self.store.take(SUB, self.decode, limit=limit, worker=self.worker)
        self.runs = [verdict.run for verdict in taken.verdicts if verdict.run is not None]
        return [run.message.id for run in self.runs]

    async def fail_all(self, after_s: float) -> None:
        ends = [Finished(run=run, outcome=Retry(after_s, "no luck")) for run in self.runs]
        await self.store.finish(ends, worker=self.worker)

    async def send(
        self,
        message_id: str,
        lane: str | None = None,
        *,
        delay_s: float = 0.0,
        ttl_s: float | None = None,
    ) -> None:
        message = Message(type="job", id=message_id, ordering_key=lane)
        body, headers = CODECS["standard"].encode(message)
        out = Outgoing(
            id=message_id, body=body, headers=headers, key=lane, delay_s=delay_s, ttl_s=ttl_s
        )
        (result,) = await self.queue.publish("jobs", [out])
        assert result.ok


@pytest.fixture
async def bench(database: Path) -> AsyncIterator[Bench]:
    bench = Bench(database)
    await bench.queue.open()
    await bench.store.open()
    bench.worker = await bench.store.register("test")
    yield bench
    await bench.store.close()
    await bench.queue.close()


@pytest.fixture
def file(database: Path) -> SqliteFile:
    return open_file(database)


def insert(conn: sqlite3.Connection) -> None:
    conn.execute("INSERT INTO roles (role) VALUES ('test')")


def test_what_is_committed_is_never_called_a_failure(
    file: SqliteFile, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that finds no room comes after the commit: the caller must not write again."""

    def no_room(conn: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(file._log, "checkpoint_if_long", no_room)
    asyncio.run(file.write(insert))
    close_file(file)
    with closing(sqlite3.connect(database)) as conn:
        assert conn.execute("SELECT count(*) FROM roles WHERE role = 'test'").fetchone() == (1,)


def test_a_reader_that_cannot_be_opened_is_a_store_that_is_away(
    file: SqliteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file handle left, say: whoever waits a store out waits that out, too."""

    def refused(*args: Any, **options: Any) -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    with monkeypatch.context() as full:
        full.setattr(sqlite3, "connect", refused)
        with pytest.raises(StoreUnavailable, match="unable to open"):
            file.read_sync(lambda conn: conn.execute("SELECT 1").fetchone())
    assert file.read_sync(lambda conn: conn.execute("SELECT 1").fetchone()) == (1,)
    close_file(file)


class NoRoom:
    """A connection whose commits find the disk full."""

    def __init__(self, conn: sqlite3.Connection) -> None:
        self._conn = conn

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            raise sqlite3.OperationalError("database or disk is full")
        return self._conn.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)


async def test_a_number_that_was_not_committed_leaves_no_sign_of_life(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to whoever registers next, who must find its sign of life free."""
    file = bench.store.file
    with monkeypatch.context() as full:
        full.setattr(file, "_conn", NoRoom(file._conn))
        with pytest.raises(StoreFull):
            await bench.store.register("refused")
    worker = await bench.store.register("accepted")
    assert bench.store.is_registered(worker)


async def test_a_conversation_that_waits_for_its_retry_holds_up_no_other(bench: Bench) -> None:
    await bench.send("a1", "a")
    assert await bench.take(limit=1) == ["a1"]
    await bench.fail_all(after_s=600)
    await bench.send("b1", "b")
    assert await bench.take(limit=1) == ["b1"]


# -- somebody sets the clock ----------------------------------------------------------------------


async def test_a_retry_is_due_when_it_was_due_before_the_clock_was_set(bench: Bench) -> None:
    await bench.send("m")
    assert await bench.take() == ["m"]
    await bench.fail_all(after_s=5)
    bench.clock.jump_wall(-86_400)
    assert await bench.take() == []
    bench.clock.advance(6)
    assert await bench.take() == ["m"]


async def test_a_delayed_message_does_not_come_early(bench: Bench) -> None:
    await bench.send("m", delay_s=1800)
    bench.clock.jump_wall(86_400)
    assert await bench.take() == []
    bench.clock.advance(1801)
    assert await bench.take() == ["m"]


async def test_what_is_written_after_the_jump_is_not_moved(bench: Bench) -> None:
    await bench.take()
    bench.clock.jump_wall(3600)
    await bench.send("m", delay_s=5)
    bench.clock.advance(6)
    assert await bench.take() == ["m"]


async def test_a_jump_while_nobody_was_there_counts_too(database: Path) -> None:
    first = Bench(database)
    await first.queue.open()
    await first.send("m", delay_s=5)
    await first.queue.close()
    later = Bench(database)
    later.clock.jump_wall(-86_400)
    await later.queue.open()
    await later.store.open()
    later.worker = await later.store.register("later")
    later.clock.advance(6)
    assert await later.take() == ["m"]
    await later.store.close()
    await later.queue.close()


async def test_nothing_expires_at_the_moment_of_a_jump(bench: Bench) -> None:
    await bench.send("m", ttl_s=600)
    bench.clock.jump_wall(3600)
    assert await bench.take() == ["m"]


async def test_small_corrections_of_the_clock_move_nothing(bench: Bench) -> None:
    await bench.send("m", delay_s=5)
    due = "SELECT due_at FROM messages"
    (before,) = bench.store.file.read_sync(lambda conn: conn.execute(due).fetchone())
    bench.clock.jump_wall(0.5)
    await bench.take()
    (after,) = bench.store.file.read_sync(lambda conn: conn.execute(due).fetchone())
    assert before == after


class Neighbours:
    """Operations that share one transaction: the writer thread is held until all are asked for."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._held = threading.Event()
        self._go = threading.Event()

    async def __aenter__(self) -> None:
        self._holding = asyncio.ensure_future(self._file.write(self._hold))
        await asyncio.to_thread(self._held.wait)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)  # what was asked for is in the queue of the thread
        self._go.set()
        await self._holding

    def _hold(self, conn: sqlite3.Connection) -> None:
        self._held.set()
        self._go.wait()


async def test_a_clock_set_in_the_middle_of_a_transaction_lets_nothing_come_early(bench: Bench):
    await bench.send("delayed", delay_s=1800)
    await bench.send("mortal", ttl_s=600)
    looks: list[int] = []

    def set_once(conn: sqlite3.Connection) -> None:
        looks.append(bench.clock.now_us())
        if len(looks) == 1:
            bench.clock.jump_wall(86_400)

    async with Neighbours(bench.store.file):
        setting = asyncio.ensure_future(bench.store.file.write(set_once))
        taking = asyncio.ensure_future(bench.take())
    assert await taking == ["mortal"]
    await setting
    assert len(looks) == 2, "the transaction ran again, by the new clock"
    bench.clock.advance(1801)
    assert await bench.take() == ["delayed"]


def test_a_thread_that_was_held_up_between_two_looks_is_no_jump(database: Path) -> None:
    class Held(FakeClock):
        """The machine stops for a minute after the steady clock was read."""

        hold_ups = 1

        def monotonic(self) -> float:
            seen = super().monotonic()
            if self.hold_ups:
                self.hold_ups -= 1
                self.advance(60)
            return seen

    clock = Held()
    clock.hold_ups = 0
    time = TimeBase(clock)
    with closing(sqlite3.connect(database)) as conn:
        time.follow(conn)
        time.committed()
        clock.hold_ups = 1
        assert not time.was_set()
        clock.hold_ups = 1
        time.follow(conn)
    assert not time.in_doubt


async def test_who_shares_a_transaction_with_a_failure_is_undone_and_done_again(bench: Bench):
    file = bench.store.file
    ran: list[int] = []

    def good(conn: sqlite3.Connection) -> int:
        ran.append(conn.execute("SELECT count(*) FROM roles WHERE role = 'test'").fetchone()[0])
        insert(conn)
        return len(ran)

    def bad(conn: sqlite3.Connection) -> None:
        conn.execute("INSERT INTO roles (role) VALUES ('bad')")
        raise ValueError("no")

    async with Neighbours(file):
        asked = [asyncio.ensure_future(file.write(op)) for op in (good, bad)]
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert ran == [0, 0]
    assert done[0] == 2
    assert str(done[1]) == "no"
    roles = file.read_sync(lambda conn: conn.execute("SELECT role FROM roles").fetchall())
    assert ("test",) in roles
    assert ("bad",) not in roles


async def test_a_failure_that_was_undone_is_no_failure_of_what_is_committed(bench: Bench):
    """The whole transaction runs again, because the clock was set; now another one fails."""
    runs: dict[str, int] = {"first": 0, "second": 0}

    def fails(name: str, after: int, until: int) -> Callable[[sqlite3.Connection], int]:
        def op(conn: sqlite3.Connection) -> int:
            runs[name] += 1
            if after < runs[name] <= until:
                if name == "second" and runs[name] == until:
                    bench.clock.jump_wall(3600)
                raise ValueError(name)
            return runs[name]

        return op

    file = bench.store.file
    # Each runs twice, once more by itself; then the clock is set, and all of it runs again.
    ops = (fails("first", 2, 4), fails("second", 0, 2))
    async with Neighbours(file):
        asked = [asyncio.ensure_future(file.write(op)) for op in ops]
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert str(done[0]) == "first"
    assert done[1] == 3


async def test_a_neighbours_failure_shows_in_no_event_and_no_number(bench: Bench):
    def bad(conn: sqlite3.Connection) -> None:
        raise ValueError("no")

    heard: list[str] = []
    bench.store.on_events(lambda entries: heard.extend(entry[3] for entry in entries))
    await bench.send("m")
    async with Neighbours(bench.store.file):
        taking = asyncio.ensure_future(bench.take())
        joining = asyncio.ensure_future(bench.store.register("another"))
        failing = asyncio.ensure_future(bench.store.file.write(bad))
    with pytest.raises(ValueError, match="no"):
        await failing
    assert await taking == ["m"]
    assert heard == ["task.claimed"]
    worker = await joining
    assert worker.worker_id == bench.worker.worker_id + 1
    bench.store.beat(worker)
    await bench.store.finish(
        [Finished(run=run, outcome=Done()) for run in bench.runs], worker=bench.worker
    )
    path = bench.store.file.path
    found = await asyncio.to_thread(verify_ledger, path, b"k" * 32, path.with_name("anchors"))
    assert found.ok, found
