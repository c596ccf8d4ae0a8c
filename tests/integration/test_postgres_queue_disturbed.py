"""Disturbances of the queue in PostgreSQL: rows that another session locks, messages that cannot be
written, rows of other programs, large messages, a clock that is set."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import psycopg
import pytest

from ackbone.brokers.postgres import PostgresBroker
from ackbone.core.broker import Outgoing
from ackbone.core.errors import InvalidMessage
from ackbone.core.store import Send
from ackbone.store.postgres.store import PostgresStore
from tests.integration.test_postgres_queue import ORDERED, Place, ids, outgoing, place
from tests.integration.test_postgres_store import rows
from tests.servers.postgres_clock import ServerClock

__all__ = ["place"]


@pytest.mark.parametrize("key", [None, "talk"])
async def test_large_messages_are_taken_a_few_at_a_time(place: Place, key: str | None) -> None:
    """All at once they would take longer than a transaction may, each time again."""
    named = [f"m{n}" for n in range(5)]
    for each in named:
        small = outgoing(each, key)
        large = msgspec.structs.replace(small, body=b" " * 6_000_000 + small.body)
        await place.broker.publish("default", [large])
    taken = await place.taken()
    runs = [verdict.run for verdict in taken.verdicts if verdict.run]
    assert taken.next_due_s == 0.0, "more of them wait"
    assert rows(place.url, "SELECT count(*) FROM messages") == [(2,)]
    found = ids(runs)
    while len(found) < 5:
        await place.finish(runs)
        runs = await place.take()
        assert runs
        found += ids(runs)
    assert found == named


async def test_a_locked_message_holds_up_its_conversation_alone(place: Place) -> None:
    await place.send("a1", "a2", key="a")
    await place.send("b1", key="b")
    await place.send("free")
    with psycopg.connect(place.url) as conn:
        conn.execute("SELECT 1 FROM messages WHERE message_id = 'a1' FOR UPDATE")
        assert sorted(ids(await place.take(sub=ORDERED))) == ["b1", "free"]
    runs = await place.take(sub=ORDERED)
    assert ids(runs) == ["a1"]
    await place.finish(runs)
    assert ids(await place.take(sub=ORDERED)) == ["a2"]


async def test_a_due_message_that_is_locked_is_not_asked_for_over_and_over(place: Place) -> None:
    await place.send("late", delay_s=0.01)
    await asyncio.sleep(0.05)  # it is due
    with psycopg.connect(place.url) as conn:
        conn.execute("SELECT 1 FROM messages FOR UPDATE")
        taken = await place.taken()
        assert taken.verdicts == []
        assert taken.next_due_s is not None
        assert taken.next_due_s >= 0.02
    assert ids(await place.take()) == ["late"]


@pytest.mark.parametrize(
    "bad",
    [
        {"id": "b\ud800"},
        {"key": "k\ud800"},
        {"headers": {"h": "\ud800"}},
        {"headers": {"h": 1}},
        {"delay_s": float("inf")},
        {"ttl_s": float("nan")},
    ],
    ids=repr,
)
async def test_a_message_that_cannot_be_written_fails_alone(
    place: Place, bad: dict[str, Any]
) -> None:
    refused = msgspec.structs.replace(outgoing("b"), **bad)
    results = await place.broker.publish("default", [outgoing("a"), refused, outgoing("c")])
    assert [each.ok for each in results] == [True, False, True]
    assert isinstance(results[1].error, InvalidMessage)
    assert sorted(ids(await place.take())) == ["a", "c"]


async def test_headers_of_another_program_hold_nothing_up(place: Place) -> None:
    await place.send("a")
    with psycopg.connect(place.url) as conn:
        conn.execute("""UPDATE messages SET headers = '{"n": 1, "none": null}'""")
    await place.send("b")
    assert sorted(ids(await place.take())) == ["a", "b"]
    assert rows(place.url, "SELECT count(*) FROM messages") == [(0,)]


class BetweenClocks(PostgresBroker):
    """The server's clock is set forward in the middle of a transaction."""

    clock: ServerClock | None = None

    def set_it(self) -> None:
        if self.clock is not None:
            self.clock.advance(3600)
            self.clock = None

    async def promote_in(self, tx: Any) -> None:
        self.set_it()
        await super().promote_in(tx)

    async def publish_in(self, tx: Any, queue: str, batch: Sequence[Outgoing]) -> None:
        self.set_it()
        await super().publish_in(tx, queue, batch)


async def test_a_transaction_goes_by_the_clock_of_its_begin(postgres_url: str) -> None:
    """What it writes or finds due by the new clock would be wrong by the jump."""
    clock = ServerClock(postgres_url)
    place = Place(postgres_url)
    broker = place.broker = BetweenClocks(postgres_url)
    place.store = PostgresStore(postgres_url, queue=broker)
    await place.open()
    try:
        await place.send("a")
        await place.send("soon", delay_s=1800.0)
        broker.clock = clock
        runs = await place.take()
        assert ids(runs) == ["a"]
        broker.clock = clock
        later = Send(queue="default", outgoing=outgoing("next", delay_s=60.0), tenant_id="default")
        await place.finish(runs, sends=(later,))
        assert await place.take() == [], "both were moved with the clock"
        left = rows(postgres_url, WAITS_FOR)
        assert [(name, round(seconds)) for name, seconds in left] == [("next", 60), ("soon", 1800)]
    finally:
        await place.close()
        clock.close()


WAITS_FOR = (
    "SELECT message_id, extract(epoch FROM due_at - (SELECT at FROM fake.clock ORDER BY since DESC"
    " LIMIT 1))::float8 FROM messages ORDER BY message_id"
)
