"""Queue and store in one PostgreSQL database: receive and claim are one transaction, finish and
publish are another one, and transactions run side by side."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psycopg
import pytest

from ackbone.brokers.postgres import PostgresBroker
from ackbone.core.broker import Outgoing, Settlement, Subscription, Verb
from ackbone.core.clock import Clock
from ackbone.core.codecs.codec import CODECS
from ackbone.core.errors import InvalidMessage, PublishUnknown, StoreUnavailable
from ackbone.core.message import Message
from ackbone.core.outcome import Done, Retry
from ackbone.core.store import Answer, Commit, Finished, Run, Send, Taken, Worker
from ackbone.engine.decoder import decoder
from ackbone.pgserver.connections import Session
from ackbone.store.postgres.records import PostgresRecords
from ackbone.store.postgres.store import PostgresStore
from ackbone.testing import FakeClock
from tests.faults.waiting import until
from tests.integration.test_postgres_store import WAITS, LostAnswers, rows

SUB = Subscription(name="default", queue="default")
ORDERED = Subscription(name="default", queue="default", ordered=True)

SLOW_COMMIT = """
CREATE FUNCTION wait_for_us() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END$$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {} DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION wait_for_us();
"""


class Place:
    """A process: a broker and a store on one database, and a worker."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.url = url
        self.broker = PostgresBroker(url)
        self.store = PostgresStore(url, queue=self.broker, clock=clock)
        self.worker = Worker(worker_id=0)

    async def open(self) -> "Place":
        await self.broker.open()
        await self.store.open()
        self.worker = await self.store.register("test")
        return self

    async def close(self) -> None:
        await self.store.close()
        await self.broker.close()

    async def send(self, *ids: str, key: str | None = None, **how: Any) -> None:
        batch = [outgoing(each, key, **how) for each in ids]
        assert all(each.ok for each in await self.broker.publish("default", batch))

    async def taken(self, limit: int = 10, sub: Subscription = SUB) -> Taken:
        return await self.store.take(sub, decoder(sub), limit=limit, worker=self.worker)

    async def take(self, limit: int = 10, sub: Subscription = SUB) -> list[Run]:
        verdicts = (await self.taken(limit, sub)).verdicts
        return [verdict.run for verdict in verdicts if verdict.run is not None]

    async def finish(self, runs: Sequence[Run], **more: Any) -> None:
        ends = [Finished(run=run, outcome=Done(), result=b"1", **more) for run in runs]
        answers = await self.store.finish(ends, worker=self.worker)
        assert answers == [Commit.COMMITTED] * len(runs)


def outgoing(message_id: str, key: str | None = None, **how: Any) -> Outgoing:
    message = Message(id=message_id, type="work", payload={}, ordering_key=key)
    body, headers = CODECS["standard"].encode(message)
    return Outgoing(id=message_id, body=body, headers=headers, key=key, **how)


def ids(runs: Sequence[Run]) -> list[str]:
    return [run.message.id for run in runs]


@pytest.fixture
async def place(postgres_url: str) -> AsyncIterator[Place]:
    place = await Place(postgres_url).open()
    yield place
    await place.close()


@pytest.fixture
async def other(postgres_url: str) -> AsyncIterator[Place]:
    place = await Place(postgres_url).open()
    yield place
    await place.close()


# -- one transaction ------------------------------------------------------------------------------


async def test_the_row_moves_from_the_queue_into_the_store(place: Place) -> None:
    await place.send("a", "b")
    runs = await place.take()
    assert ids(runs) == ["a", "b"]
    assert rows(place.url, "SELECT count(*) FROM messages") == [(0,)]
    held = rows(place.url, "SELECT held, status, body IS NOT NULL FROM queue_executions")
    assert held == [("store", "running", True)] * 2
    await place.finish(runs)
    ended = rows(place.url, "SELECT status, body FROM queue_executions")
    assert ended == [("succeeded", None)] * 2


async def test_a_follow_up_is_in_the_queue_with_the_commit(place: Place) -> None:
    await place.send("a")
    (run,) = await place.take()
    send = Send(queue="default", outgoing=outgoing("next"), tenant_id="default")
    await place.finish([run], sends=(send,))
    assert rows(place.url, "SELECT count(*) FROM outbox") == [(0,)]
    assert ids(await place.take()) == ["next"]


async def test_a_run_whose_follow_up_is_refused_does_not_succeed(place: Place) -> None:
    await place.send("a")
    with psycopg.connect(place.url) as conn:
        conn.execute("ALTER TABLE messages ADD CHECK (message_id <> 'next')")
    (run,) = await place.take()
    send = Send(queue="default", outgoing=outgoing("next"), tenant_id="default")
    end = Finished(run=run, outcome=Done(), result=b"1", sends=(send,))
    assert await place.store.finish([end], worker=place.worker) == [Commit.BURIED]
    assert rows(place.url, "SELECT status FROM queue_executions") == [("failed",)]


async def test_a_refused_run_sends_nothing(place: Place) -> None:
    await place.send("a")
    (run,) = await place.take()
    with psycopg.connect(place.url) as conn:
        conn.execute("UPDATE queue_executions SET epoch = epoch + 1")
    send = Send(queue="default", outgoing=outgoing("next"), tenant_id="default")
    end = Finished(run=run, outcome=Done(), result=b"1", sends=(send,))
    assert await place.store.finish([end], worker=place.worker) == [Commit.FENCED]
    assert await place.take() == []


async def test_a_dead_worker_takes_nothing(place: Place) -> None:
    await place.send("a")
    with psycopg.connect(place.url) as conn:
        conn.execute("UPDATE workers SET state = 'dead'")
    with pytest.raises(StoreUnavailable, match="was declared dead"):
        await place.take()
    assert rows(place.url, "SELECT count(*) FROM messages") == [(1,)]


async def test_priority_delay_and_waiting_work(place: Place) -> None:
    await place.send("low", priority=0)
    await place.send("late", delay_s=0.5, priority=3)
    await place.send("high", priority=3)
    await place.send("middle", priority=1)
    (run,) = await place.take(1)
    assert run.message.id == "high"
    retry = Finished(run=run, outcome=Retry(0.0, "again"))
    await place.store.finish([retry], worker=place.worker)
    taken = await place.taken()
    assert [v.run.message.id for v in taken.verdicts if v.run] == ["high", "middle", "low"]
    assert taken.next_due_s is not None
    assert 0.0 < taken.next_due_s <= 0.5
    await asyncio.sleep(taken.next_due_s)
    assert ids(await place.take()) == ["late"]


async def test_an_expired_message_ends(place: Place) -> None:
    await place.send("a", ttl_s=0.001)
    await asyncio.sleep(0.05)
    (verdict,) = (await place.taken()).verdicts
    assert verdict.answer is Answer.EXPIRED


async def test_a_time_to_live_begins_when_the_delay_is_over(place: Place) -> None:
    await place.send("a", delay_s=60.0, ttl_s=5.0)
    lives = rows(place.url, "SELECT extract(epoch FROM expires_at - due_at)::float8 FROM messages")
    assert lives == [(5.0,)]


async def test_a_message_that_no_row_can_hold_ends_alone(place: Place) -> None:
    await place.send(*(f"m{n}" for n in range(9)))
    with psycopg.connect(place.url) as conn:
        conn.execute("ALTER TABLE queue_executions ADD CHECK (message_id <> 'm4')")
    found: list[str] = []
    while (taken := await place.taken()).verdicts:
        found += [verdict.run.message.id for verdict in taken.verdicts if verdict.run]
    assert sorted(found) == [f"m{n}" for n in range(9) if n != 4]
    letters = rows(place.url, "SELECT reason, body IS NOT NULL FROM dead_letters")
    assert letters == [("unstorable", True)]
    assert rows(place.url, "SELECT count(*) FROM messages") == [(0,)]


# -- side by side ---------------------------------------------------------------------------------


async def test_nobody_waits_for_the_rows_of_another_take(place: Place, other: Place) -> None:
    await place.send(*(f"m{n:03}" for n in range(200)))
    parts = await asyncio.gather(*(each.take(25) for each in (place, other) * 4))
    found = [message_id for part in parts for message_id in ids(part)]
    assert sorted(found) == [f"m{n:03}" for n in range(200)]


async def test_conversations_keep_their_order_whoever_moves_them(
    place: Place, other: Place
) -> None:
    sent: dict[str, list[str]] = {f"k{n}": [] for n in range(7)}
    for n in range(600):
        key = f"k{n % 7}"
        sent[key].append(f"m{n:03}")
    for key, named in sent.items():
        await place.send(*named, key=key)
    ran: dict[str, list[str]] = {key: [] for key in sent}

    async def work(at: Place) -> None:
        while sum(map(len, ran.values())) < 600:
            runs = await at.take(5)
            for run in runs:
                ran[run.message.ordering_key or ""].append(run.message.id)
            await at.finish(runs)

    await asyncio.gather(work(place), work(other), work(place), work(other))
    assert ran == sent


async def test_only_one_moves_messages_into_their_conversations(place: Place, other: Place) -> None:
    """Another transaction has numbers that come first, and has not committed them yet."""
    await place.send("a1", key="a")
    with psycopg.connect(place.url) as conn:
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('default', 7310579635104524))")
        await place.send("free")
        assert ids(await other.take()) == ["free"], "others are not held up"
    assert ids(await other.take()) == ["a1"]


async def test_others_are_woken_for_conversations_that_were_moved(
    place: Place, other: Place
) -> None:
    woken = other.store.subscribe()
    await until(lambda: rows(place.url, LISTENERS) == [(2,)], "both stores listen")
    batch = [outgoing(f"{key}1", key) for key in "abc"]
    async with asyncio.timeout(30):
        woken.clear()
        await place.broker.publish("default", batch)
        await woken.wait()
        woken.clear()
        assert len(await place.take(1, ORDERED)) == 1
        await woken.wait()
    assert len(await other.take(10, ORDERED)) == 2


async def test_readers_of_other_processes_are_woken(place: Place, other: Place) -> None:
    woken = other.store.subscribe()
    await until(lambda: rows(place.url, LISTENERS) == [(2,)], "both stores listen")
    woken.clear()
    await place.send("a")
    async with asyncio.timeout(30):
        await woken.wait()


LISTENERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND starts_with(query, 'LISTEN')"
)


# -- answers that are lost ------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "a"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_take_whose_answer_is_lost_is_granted_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, times: int, key: str | None
) -> None:
    await place.send("a", "b", key=key)
    await place.send("c")
    LostAnswers(place.store.database, monkeypatch, times)
    if times == 3:
        with pytest.raises(StoreUnavailable):
            await place.take()
    found: list[str] = []
    while runs := await place.take():
        found += ids(runs)
        await place.finish(runs)
    assert sorted(found) == ["a", "b", "c"]
    ended = rows(place.url, "SELECT attempt, epoch, status FROM queue_executions")
    assert ended == [(1, 1, "succeeded")] * 3


async def test_a_take_that_is_being_committed_when_its_connection_is_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can see its rows. The repeat ends it, and finds the messages in the queue."""
    await place.send("a", "b")
    sessions: list[Session] = []
    once = place.store.database._once

    async def seen(session: Session, *rest: Any) -> Any:
        sessions.append(session)
        return await once(session, *rest)

    monkeypatch.setattr(place.store.database, "_once", seen)
    with psycopg.connect(place.url, autocommit=True) as conn:
        conn.execute(SLOW_COMMIT.format("queue_executions"))
        conn.execute("SELECT pg_advisory_lock(7)")
        taking = asyncio.create_task(place.take())
        await until(lambda: rows(place.url, WAITS, "advisory") == [(1,)], "it commits")
        cut(sessions[0])
        await until(lambda: len(sessions) > 1, "it is repeated")
        conn.execute("SELECT pg_advisory_unlock(7)")
    runs = await taking
    assert sorted(ids(runs)) == ["a", "b"]
    await place.finish(runs)
    assert await place.take() == []


async def test_a_publish_without_an_answer_is_unknown(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    connections = place.broker.connections
    with psycopg.connect(place.url, autocommit=True) as conn:
        conn.execute(SLOW_COMMIT.format("messages"))
        conn.execute("SELECT pg_advisory_lock(7)")
        session = connections._session

        def seen() -> Any:
            sessions.extend(connections._idle[-1:])
            return session()

        monkeypatch.setattr(connections, "_session", seen)
        sending = asyncio.create_task(place.broker.publish("default", [outgoing("a")]))
        await until(lambda: rows(place.url, WAITS, "advisory") == [(1,)], "it commits")
        cut(sessions[0])
        with pytest.raises(PublishUnknown, match="whether a was stored"):
            await sending


async def test_a_bad_message_fails_alone(place: Place) -> None:
    batch = [outgoing("a"), outgoing("b\0"), outgoing("c")]
    results = await place.broker.publish("default", batch)
    assert [each.ok for each in results] == [True, False, True]
    assert isinstance(results[1].error, InvalidMessage)
    assert sorted(ids(await place.take())) == ["a", "c"]


def cut(session: Session) -> None:
    with socket.socket(fileno=os.dup(session.conn.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


# -- people ---------------------------------------------------------------------------------------


async def test_records_show_what_waits(place: Place) -> None:
    await place.send("needle", "hay")
    await place.send("later", delay_s=60.0)
    records = PostgresRecords(place.store)
    found = await records.waiting_with("needle", limit=5)
    assert [(each.message_id, each.state, each.intact) for each in found] == [
        ("needle", "ready", True)
    ]
    assert not await place.store.is_empty(["default"])


async def test_a_lease_that_is_over_returns_the_message(place: Place) -> None:
    broker = PostgresBroker(place.url, lease_s=0.2)
    await broker.open()
    await place.send("a")
    source = await broker.subscribe(SUB, room=1)
    (first,) = await source.receive(limit=1, wait=30)
    (second,) = await source.receive(limit=1, wait=30)
    assert (first.identity, second.identity, second.count) == ("a", "a", 2)
    await source.settle([Settlement(delivery=first, verb=Verb.ACK)])
    assert rows(place.url, "SELECT state FROM messages") == [(2,)], "a stale tag settles nothing"
    await broker.close()
    assert rows(place.url, "SELECT state FROM messages") == [(0,)]


async def test_a_delayed_message_is_due_when_it_was_due_before_the_clock_was_set(
    postgres_url: str,
) -> None:
    """An hour passes here, and none on the server's clock: somebody set it back by an hour."""
    clock = FakeClock()
    place = await Place(postgres_url, clock).open()
    try:
        await place.send("soon", delay_s=1800.0)
        await place.send("late", delay_s=7200.0)
        assert await place.take() == []
        clock.advance(3600)
        assert ids(await place.take()) == ["soon"]
        assert await place.take() == []
    finally:
        await place.close()
