"""Rows of `workers`: kept as long as the ledger needs them, and no longer."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.brokers.sqlite import SqliteBroker
from holdfast.core.broker import Outgoing, Subscription
from holdfast.core.events import Entry
from holdfast.sqlite.file import SqliteFile
from holdfast.store.migrate import ensure_schema
from holdfast.store.sqlite.store import SqliteStore


@pytest.fixture
async def store(home: Path) -> AsyncIterator[SqliteStore]:
    path = home / "holdfast.db"
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
    await store.file.write(lambda conn: store.ledger.append(conn, worker.worker_id, [event], 1))
    await store.leave(worker)
    assert await rows(store.file) == [(worker.worker_id, "left")]


async def test_whose_past_is_unknown_stays(home: Path, store: SqliteStore) -> None:
    """A store that did not give the number out cannot know what was written under it."""
    worker = await store.register("elsewhere")
    other = SqliteStore(home / "holdfast.db")
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
    taken = await broker.receive(Subscription(name="q", queue="q"), limit=1, wait=0)
    assert len(taken) == 1
    assert [state for _, state in await rows(witness.file)] == ["alive"]
    await broker.close()
    assert await rows(witness.file) == [], "it wrote no event, ever"
    again = await witness.receive(Subscription(name="q", queue="q"), limit=1, wait=0)
    assert len(again) == 1, "and the message is free again"
    await witness.close()
