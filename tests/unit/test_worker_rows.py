"""Rows of `workers`: kept as long as the ledger needs them, and no longer."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Outgoing, Subscription
from ackbone.core.errors import StoreUnavailable
from ackbone.core.events import Entry
from ackbone.sqlitefile.file import SqliteFile
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from ackbone.testing.clock import FakeClock
from tests import sources


@pytest.fixture
async def store(home: Path) -> AsyncIterator[SqliteStore]:
    path = home / "ackbone.db"
    ensure_schema(path)
    store = SqliteStore(path)
    await store.open()
    yield store
    await store.close()


async def rows(file: SqliteFile) -> list[Any]:
    found = await file.read(
        lambda conn: conn.execute("SELECT worker_id, state FROM workers ORDER BY 1").fetchall()
    )
    return list(found)


async def test_who_wrote_no_event_leaves_no_row_and_its_number_is_not_given_again(
    store: SqliteStore,
) -> None:
    """As most commands that only look, and workers that found nothing to do."""
    first = await store.register("first")
    await store.leave(first)
    assert await rows(store.file) == []
    second = await store.register("second")
    assert second.worker_id > first.worker_id
    assert not store.is_registered(first)


async def test_who_wrote_one_stays_for_the_pruner_to_ask(store: SqliteStore) -> None:
    worker = await store.register("writer")
    event: Entry = ("acme", "q", "m-1", "task.claimed", {})
    await store.file.write(lambda conn: store._ledger.write(conn, worker.worker_id, [event], 1))
    await store.leave(worker)
    assert await rows(store.file) == [(worker.worker_id, "left")]


async def test_whose_past_is_unknown_stays(home: Path, store: SqliteStore) -> None:
    """A store that did not give the number out cannot know what was written under it."""
    worker = await store.register("elsewhere")
    other = SqliteStore(home / "ackbone.db")
    await other.open()
    try:
        await other.leave(worker)
    finally:
        await other.close()
    assert await rows(store.file) == [(worker.worker_id, "left")]


async def test_the_owner_of_taken_messages_goes_with_its_broker(home: Path) -> None:
    path = home / "queue.db"
    ensure_schema(path)
    broker, witness = SqliteBroker(path), SqliteBroker(path)
    await witness.open()
    await broker.open()
    await broker.publish("q", [Outgoing(id="m-1", body=b"{}")])
    taken = await sources.receive(broker, Subscription(name="q", queue="q"), limit=1, wait=0)
    assert len(taken) == 1
    assert [state for _, state in await rows(witness.file)] == ["alive"]
    await broker.close()
    assert await rows(witness.file) == [], "it wrote no event, ever"
    again = await sources.receive(witness, Subscription(name="q", queue="q"), limit=1, wait=0)
    assert len(again) == 1, "and the message is free again"
    await witness.close()


async def test_a_sign_of_life_that_the_disk_refuses_is_a_store_that_is_away(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other error would end the thread that gives them, without a word."""
    worker = await store.register("worker")

    def refused(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", refused)
        with pytest.raises(StoreUnavailable, match="Input/output"):
            store.beat(worker)
    store.beat(worker)


# -- a machine that slept -------------------------------------------------------------------------


@pytest.fixture
async def neighbours(home: Path) -> AsyncIterator[tuple[FakeClock, SqliteStore, SqliteStore]]:
    """Two processes on one file, whose time a test moves."""
    path = home / "ackbone.db"
    ensure_schema(path)
    clock = FakeClock()
    one, other = SqliteStore(path, clock=clock), SqliteStore(path, clock=clock)
    await one.open()
    await other.open()
    yield clock, one, other
    await other.close()
    await one.close()


async def test_who_stood_still_with_the_reaper_gets_time_to_beat_again(
    neighbours: tuple[FakeClock, SqliteStore, SqliteStore],
) -> None:
    """A laptop that slept: whoever wakes first must not take the others for dead, and count a
    crash against what they run."""
    clock, one, other = neighbours
    me, neighbour = await one.register("me"), await other.register("neighbour")

    async def dead() -> list[int]:
        one.beat(me)
        found = await one.reap(worker=me, lease_s=10.0, crash_budget=3)
        return list(found.workers)

    assert await dead() == []
    clock.advance(3600.0)  # all of it stops
    assert await dead() == []
    other.beat(neighbour)
    for _ in range(3):
        clock.advance(4.0)
        other.beat(neighbour)
        assert await dead() == []
    for _ in range(3):  # from now on it stands still alone
        clock.advance(4.0)
        found = await dead()
    assert found == [neighbour.worker_id]


async def test_who_is_gone_after_a_standstill_is_dead_at_once(
    neighbours: tuple[FakeClock, SqliteStore, SqliteStore],
) -> None:
    clock, one, other = neighbours
    me, neighbour = await one.register("me"), await other.register("neighbour")
    await one.reap(worker=me, lease_s=10.0, crash_budget=3)
    clock.advance(3600.0)
    other._leases.release(neighbour.worker_id)
    found = await one.reap(worker=me, lease_s=10.0, crash_budget=3)
    assert list(found.workers) == [neighbour.worker_id]
