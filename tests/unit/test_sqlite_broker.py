"""How the embedded broker writes its rows: most messages in a shorter way, with the same result."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Outgoing, Subscription
from ackbone.core.errors import StoreUnavailable
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.testing import FakeClock
from tests import sources

QUEUE = "q"
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=10)
plain = st.builds(Outgoing, id=texts, body=st.binary(max_size=50), priority=st.integers(0, 3))
anything = plain | st.builds(
    Outgoing,
    id=texts,
    body=st.binary(max_size=50),
    headers=st.dictionaries(texts, texts, max_size=2),
    priority=st.integers(0, 3),
    delay_s=st.floats(0, 1000),
    ttl_s=st.none() | st.floats(0.1, 1000),
    key=st.none() | texts,
)
KEYED = Outgoing(id="other", body=b"", key="k")


async def rows_of(broker: SqliteBroker, batch: list[Outgoing]) -> list[tuple[Any, ...]]:
    """What publishing makes of them, in order; the queue is empty afterwards."""
    assert all(result.ok for result in await broker.publish(QUEUE, batch))

    def take(conn: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = conn.execute(
            "SELECT * FROM messages ORDER BY seq"
        ).fetchall()
        conn.execute("DELETE FROM messages")
        return [row[1:] for row in found]

    return await broker.file.write(take)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(batch=st.lists(anything, min_size=1, max_size=6))
async def test_a_neighbour_does_not_change_a_row(home: Path, batch: list[Outgoing]) -> None:
    """Alone, beside its like, and beside one that needs every column."""
    ensure_schema(home / "h.db")
    broker = SqliteBroker(home / "h.db", FakeClock())
    await broker.open()
    try:
        together = await rows_of(broker, batch)
        alone = [row for item in batch for row in await rows_of(broker, [item])]
        beside = await rows_of(broker, [*batch, KEYED])
    finally:
        await broker.close()
    assert together == alone == beside[:-1]
    assert len(together) == len(batch)


async def test_many_keep_their_order(home: Path) -> None:
    ensure_schema(home / "h.db")
    broker = SqliteBroker(home / "h.db", FakeClock())
    await broker.open()
    try:
        batch = [Outgoing(id=str(n), body=b"%d" % n) for n in range(777)]
        rows = await rows_of(broker, batch)
    finally:
        await broker.close()
    assert [row[3] for row in rows] == [item.id for item in batch]


async def test_a_receive_that_is_cancelled_while_the_file_fails_is_cancelled(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_schema(home / "h.db")
    broker = SqliteBroker(home / "h.db", FakeClock())
    await broker.open()
    asked, go = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        asked.set()
        go.wait()
        raise StoreUnavailable("away")

    monkeypatch.setattr(broker, "_receive_in", fail)
    receiving = asyncio.ensure_future(
        sources.receive(broker, Subscription(name=QUEUE, queue=QUEUE), limit=1, wait=60)
    )
    await asyncio.to_thread(asked.wait)
    receiving.cancel()
    await asyncio.sleep(0)  # it waits for the answer, to give back what it might have got
    go.set()
    await asyncio.wait({receiving})
    assert receiving.cancelled()
    await broker.close()


async def test_a_broker_closed_at_its_first_receive_leaves_nobody_behind(home: Path) -> None:
    ensure_schema(home / "h.db")
    broker, other = (SqliteBroker(home / "h.db", FakeClock()) for _ in range(2))
    await broker.open()
    await other.open()
    await other.publish(QUEUE, [Outgoing(id="m", body=b"x")])
    held, go = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        held.set()
        go.wait()

    holding = asyncio.ensure_future(other.file.write(hold))
    await asyncio.to_thread(held.wait)
    sub = Subscription(name=QUEUE, queue=QUEUE)
    receiving = asyncio.ensure_future(sources.receive(broker, sub, limit=1, wait=60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # what it asked for is in the queue of the writer thread
    closing = asyncio.ensure_future(broker.close())
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(holding, receiving, closing)
    left = await other.file.read(
        lambda conn: conn.execute(
            "SELECT (SELECT count(*) FROM workers), (SELECT state FROM messages)"
        ).fetchone()
    )
    assert left == (0, 0)
    await other.close()
