"""The PostgreSQL store where it differs: lost answers, crossing batches, values that no row takes,
claims of the dead, plans of the hot statements."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ackbone.brokers.memory import MemoryBroker
from ackbone.core.approvals import Approval, ApprovalFilter
from ackbone.core.broker import Delivery, Subscription
from ackbone.core.clock import to_us
from ackbone.core.codecs.codec import CODECS
from ackbone.core.errors import Conflict, StoreUnavailable
from ackbone.core.message import Message
from ackbone.core.outbound.delivery import New, Outbound, Sent, Settled, unlimited
from ackbone.core.outcome import Dead, Done, Park, ParkKind, Question, Retry
from ackbone.core.quota import Limits, Quota
from ackbone.core.records import Identity
from ackbone.core.store import Answer, Candidate, Commit, EffectState, Finished, Reply, Run, Worker
from ackbone.engine.decoder import decoder
from ackbone.pgserver import arrays
from ackbone.pgserver.connections import _SETTINGS, READERS, WRITERS, Session
from ackbone.pgserver.wake import WakeUps
from ackbone.store.operations import StoreOperations
from ackbone.store.outbox import Outbox
from ackbone.store.postgres import database, key_rows, leases, task_rows
from ackbone.store.postgres.database import Database
from ackbone.store.postgres.deliveries import PostgresDeliveries
from ackbone.store.postgres.granted_runs import PostgresGrantedRuns
from ackbone.store.postgres.partitions import PartitionMaker, make_partitions
from ackbone.store.postgres.records import PostgresRecords
from ackbone.store.postgres.sql import SQL
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.postgres.verify import verify_ledger
from tests.faults.waiting import until
from tests.servers.postgres_clock import ServerClock, silence

pytestmark = pytest.mark.xdist_group("postgres")
SUB = Subscription(name="s", queue="q", ordered=False)
_tags = itertools.count()
LOCK_TIMEOUT_S = 9.0
"""Just less than the `lock_timeout` of the connections."""


def candidate(message_id: str, **fields: Any) -> Candidate:
    message = Message(id=message_id, type=fields.pop("type", "t"), **fields)
    body, headers = CODECS["standard"].encode(message)
    return decoder(SUB)(Delivery(body=body, headers=headers, tag=next(_tags), identity=message_id))


def done(run: Run) -> Finished:
    return Finished(run=run, outcome=Done(), result=b"1")


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def worker(store: PostgresStore) -> Worker:
    return await store.register("test")


def rows(url: str, sql: str, *values: Any) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as conn:
        return conn.execute(sql, values).fetchall()


class LostAnswers:
    """The next commits are made, and their answers lost: the connection is cut right after."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        once = database._once

        async def cut(session: Any, op: Any, *rest: Any) -> Any:
            if self.left == 0:
                return await once(session, op, *rest)
            commit: Callable[..., Awaitable[None]] = rest[2]

            async def committed(tx: Any, end: Callable[[], Awaitable[None]]) -> None:
                async def unheard() -> None:
                    await end()
                    if self.left:
                        self.left -= 1
                        await session.conn.close()
                        raise psycopg.OperationalError("the connection is lost")

                await commit(tx, unheard)

            return await once(session, op, rest[0], rest[1], committed, *rest[3:])

        monkeypatch.setattr(database, "_once", cut)


async def test_a_claim_whose_answer_is_lost_is_granted_once(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    lost = LostAnswers(store.database, monkeypatch, 1)
    verdicts = await store.claim(SUB, [candidate("a"), candidate("b")], worker=worker)
    assert lost.left == 0
    assert [v.answer for v in verdicts] == [Answer.RUN] * 2
    runs = [v.run for v in verdicts if v.run is not None]
    assert await store.finish([done(run) for run in runs], worker=worker) == [Commit.COMMITTED] * 2
    assert (
        rows(postgres_url, "SELECT attempt, epoch, status FROM queue_executions")
        == [(1, 1, "succeeded")] * 2
    )


async def test_even_if_the_store_is_away_for_longer_than_it_repeats(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    LostAnswers(store.database, monkeypatch, 3)
    with pytest.raises(StoreUnavailable):
        await store.claim(SUB, [candidate("a")], worker=worker)
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
    assert verdict.answer is Answer.RUN
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
    assert verdict.answer is Answer.ADOPTED, "a further copy of what runs here"


async def test_a_claim_that_adopts_stores_the_whole_message(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    """Its copy is acknowledged before it runs: a crash must bring it back from the store."""
    verdicts = await store.claim(SUB, [candidate("a")], worker=worker, adopt=True)
    assert [v.answer for v in verdicts] == [Answer.RUN]
    held = rows(postgres_url, "SELECT held, status, body IS NOT NULL FROM queue_executions")
    assert held == [("store", "running", True)]


async def test_due_work_whose_claim_is_unheard_of_is_granted(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
    assert verdict.run is not None
    again = Finished(run=verdict.run, outcome=Retry(0.0, "again"))
    await store.finish([again], worker=worker)
    LostAnswers(store.database, monkeypatch, 3)
    with pytest.raises(StoreUnavailable):
        await store.claim_ready(SUB, limit=10, worker=worker)
    (verdict,) = await store.claim_ready(SUB, limit=10, worker=worker)
    assert verdict.run is not None
    assert (await store.finish([done(verdict.run)], worker=worker)) == [Commit.COMMITTED]


SLOW_COMMIT = """
CREATE FUNCTION wait_for_us() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END$$;
CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON queue_executions DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.status = 'running') EXECUTE FUNCTION wait_for_us();
"""
WAITS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = %s"
)


async def test_due_work_whose_claim_is_committed_late_is_granted(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    """The connection is lost while the server commits: the repeat sees the rows as they were, and
    must not say that there are none. They would run under a living worker for ever."""
    verdicts = await store.claim(SUB, [candidate("b"), candidate("a")], worker=worker)
    again = [Finished(run=v.run, outcome=Retry(0.0, "again")) for v in verdicts if v.run]
    await store.finish(again, worker=worker)
    sessions: list[Session] = []
    once = store.database._once

    async def seen(session: Session, *rest: Any) -> Any:
        sessions.append(session)
        return await once(session, *rest)

    monkeypatch.setattr(store.database, "_once", seen)
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute(SLOW_COMMIT)
        conn.execute("SELECT pg_advisory_lock(7)")
        claiming = asyncio.create_task(store.claim_ready(SUB, limit=10, worker=worker))
        await until(lambda: rows(postgres_url, WAITS, "advisory") == [(1,)], "it commits")
        with socket.socket(fileno=os.dup(sessions[0].conn.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
        await until(
            lambda: claiming.done() or rows(postgres_url, WAITS, "transactionid") == [(1,)],
            "the repeat waits for what is being committed",
        )
    verdicts = await claiming
    assert [v.run.message.id for v in verdicts if v.run is not None] == ["a", "b"]
    ends = [done(v.run) for v in verdicts if v.run is not None]
    assert await store.finish(ends, worker=worker) == [Commit.COMMITTED] * 2
    ended = rows(postgres_url, "SELECT attempt, epoch, status FROM queue_executions")
    assert ended == [(2, 2, "succeeded")] * 2
    assert await store.claim_ready(SUB, limit=10, worker=worker) == []


@pytest.mark.parametrize("times", [1, 3])
async def test_a_reply_whose_taking_is_unheard_of_is_sent_once(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Nobody else would send it: its worker lives."""
    queue = PostgresDeliveries(store)
    channels = {"c": unlimited}
    new = New(id="r", tenant_id="acme", channel="c", recipient="ann", content="hi")
    await queue.put([new])
    LostAnswers(store.database, monkeypatch, times)
    if times == 3:  # more often than it is repeated
        with pytest.raises(StoreUnavailable):
            await queue.take(channels, limit=10, worker=worker)
    (reply,) = (await queue.take(channels, limit=10, worker=worker)).replies
    assert (reply.id, reply.content, reply.call, reply.in_doubt) == ("r", "hi", 1, False)
    assert not (await queue.take(channels, limit=10, worker=worker)).replies
    await queue.settle(channels, [Settled(reply=reply, result=Sent())], worker=worker)
    assert await queue.due_in_s(channels) is None


async def test_recovery_reads_only_windows_that_count(store: PostgresStore, worker: Worker) -> None:
    """There may be one for each chat of a year, and all senders wait for it."""
    queue = PostgresDeliveries(store)
    await queue.put([New(id="r", tenant_id="acme", channel="c", recipient="ann", content="hi")])
    dead = await store.register("dead")
    await queue.take({"c": unlimited}, limit=1, worker=dead)
    await store.leave(dead)
    over = "INSERT INTO send_windows (key, state, ends_at) VALUES ('k', '[]', clock_timestamp())"
    await store.read(over)
    assert await queue.recover(worker=worker) == 1


@pytest.mark.parametrize("times", [1, 3])
async def test_followers_whose_taking_is_unheard_of_go_out_once(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """By their head's call if it is found out in time, else after it."""
    queue = PostgresDeliveries(store)
    channels = {"c": unlimited}
    await queue.put(
        [
            New(id=each, tenant_id="acme", channel="c", recipient="ann", content=f"text of {each}")
            for each in "abc"
        ]
    )
    (head,) = (await queue.take(channels, limit=10, worker=worker)).replies
    LostAnswers(store.database, monkeypatch, times)
    found: Sequence[Outbound] = ()
    try:
        found = await queue.follow(head, lambda _: True, limit=9, worker=worker)
    except StoreUnavailable:
        assert times == 3, "more often than it is repeated"
    assert [reply.content for reply in found] == (["text of b", "text of c"] * (times == 1))
    assert not (await queue.take(channels, limit=10, worker=worker)).replies
    sent = [Settled(reply=reply, result=Sent()) for reply in (head, *found)]
    await queue.settle(channels, sent, worker=worker)
    for name in "bc" if times == 3 else "":
        (reply,) = (await queue.take(channels, limit=10, worker=worker)).replies
        assert (reply.id, reply.in_doubt) == (name, False)
        await queue.settle(channels, [Settled(reply=reply, result=Sent())], worker=worker)
    assert await queue.due_in_s(channels) is None


@pytest.mark.parametrize("size", [100_000, 3_000_000, 20_000_000])
async def test_more_than_a_socket_takes_at_once(
    store: PostgresStore, worker: Worker, size: int
) -> None:
    queue = PostgresDeliveries(store)
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
    assert verdict.run is not None
    reply = Reply(channel="c", recipient="ann", content="x" * size)
    finished = msgspec.structs.replace(done(verdict.run), replies=[reply])
    async with asyncio.timeout(20):
        assert await store.finish([finished], worker=worker) == [Commit.COMMITTED]
        (taken,) = (await queue.take({"c": unlimited}, limit=1, worker=worker)).replies
    assert len(taken.content) == size


async def test_a_settlement_whose_answer_is_lost_is_made_once(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    queue = PostgresDeliveries(store)
    channels = {"c": unlimited}
    new = New(id="r", tenant_id="acme", channel="c", recipient="ann", content="hi")
    await queue.put([new])
    (reply,) = (await queue.take(channels, limit=10, worker=worker)).replies
    LostAnswers(store.database, monkeypatch, 1)
    part = Settled(reply=reply, result=Sent(receipt="n", more=True))
    await queue.settle(channels, [part], worker=worker)
    ((receipts, status),) = rows(postgres_url, "SELECT receipts, status FROM deliveries")
    assert (receipts, status) == (["n"], "pending")
    told = rows(postgres_url, "SELECT event_type FROM event_log WHERE event_type LIKE 'delivery%%'")
    assert sorted(told) == [("delivery.created",), ("delivery.part",)]


async def test_a_reply_whose_writing_is_unheard_of_is_told_once(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
    assert verdict.run is not None
    told = "SELECT data->>'delivery_id' FROM event_log WHERE event_type = 'delivery.created'"
    early = Reply(channel="c", recipient="ann", content="at once", now=True)
    LostAnswers(store.database, monkeypatch, 1)
    name = await store.reply_now(verdict.run, early, 0)
    assert rows(postgres_url, told) == [(name,)]
    reply = Reply(channel="c", recipient="ann", content="at the end")
    finished = msgspec.structs.replace(done(verdict.run), replies=[reply])
    LostAnswers(store.database, monkeypatch, 1)
    await store.finish([finished], worker=worker)
    assert len(rows(postgres_url, told)) == 2
    assert rows(postgres_url, "SELECT count(*) FROM deliveries") == [(2,)]


async def test_a_finish_whose_answer_is_lost_is_already(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    verdicts = await store.claim(SUB, [candidate(f"m{n}") for n in range(3)], worker=worker)
    runs = [v.run for v in verdicts if v.run is not None]
    LostAnswers(store.database, monkeypatch, 1)
    ends = [done(runs[0]), done(runs[1]), Finished(run=runs[2], outcome=Dead(reason="r"))]
    assert list(await store.finish(ends, worker=worker)) == [Commit.ALREADY] * 3
    assert rows(postgres_url, "SELECT count(*) FROM dead_letters") == [(1,)]


Act = Callable[[StoreOperations, Identity, str], Awaitable[Any]]
ACTS: dict[str, tuple[str, Act, Any]] = {
    "cancel what waits": ("new", lambda o, m, _: o.cancel(m, queue="q", reason="r"), "ended"),
    "cancel what is parked": (
        "parked",
        lambda o, m, _: o.cancel(m, queue="q", reason="r"),
        "ended",
    ),
    "resume": ("parked", lambda o, m, _: o.resume(m), None),
    "discard": ("parked", lambda o, m, _: o.discard_parked(m, reason="r"), None),
    "approve": ("asked", lambda o, _, a: o.approve(a, by="ann"), "approved"),
    "reject": ("asked", lambda o, _, a: o.reject(a, by="ann"), "rejected"),
    "say the first yes": ("asked twice", lambda o, _, a: o.approve(a, by="ann"), "pending"),
    "pause": ("new", lambda o, _m, _a: o.pause("q"), True),
}
"""What it is done to, the act, and its answer (of an approval: its state)."""


@pytest.mark.parametrize("name", ACTS)
async def test_an_act_whose_answer_is_lost_is_answered_as_it_was(
    store: PostgresStore,
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
    postgres_url: str,
    name: str,
) -> None:
    to, act, expected = ACTS[name]
    approval_id = ""
    if to != "new":
        (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
        assert verdict.run is not None
        question = Question(
            rule="r", payload_sha256=b"1" * 32, expires_s=60.0, four_eyes=to == "asked twice"
        )
        park = Park(ParkKind.WAITING_APPROVAL, "?", None if to == "parked" else question)
        await store.finish([Finished(run=verdict.run, outcome=park)], worker=worker)
        asked = await PostgresRecords(store).approvals(ApprovalFilter(), limit=1)
        approval_id = asked[0].id if asked else ""
    async with StoreOperations(store, by="me") as operations:
        task = Identity(tenant_id="default", subscription="s", message_id="a")
        lost = LostAnswers(store.database, monkeypatch, 1)
        answer = await act(operations, task, approval_id)
        assert lost.left == 0
    assert (answer.state if isinstance(answer, Approval) else answer) == expected
    told = rows(postgres_url, "SELECT event_type, count(*) FROM event_log GROUP BY 1")
    assert {count for _, count in told} == {1}


async def test_an_act_that_another_one_did_meanwhile_is_refused(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
    assert verdict.run is not None
    question = Question(rule="r", payload_sha256=b"1" * 32, expires_s=60.0, four_eyes=False)
    park = Park(ParkKind.WAITING_APPROVAL, "?", question)
    await store.finish([Finished(run=verdict.run, outcome=park)], worker=worker)
    (asked,) = await PostgresRecords(store).approvals(ApprovalFilter(), limit=1)
    once = store.database._once
    async with StoreOperations(store, by="me") as operations:

        async def never_committed(*args: Any) -> Any:
            monkeypatch.setattr(store.database, "_once", once)
            await operations.approve(asked.id, by="bob")
            raise database._Unknown(psycopg.OperationalError("the connection is lost"))

        monkeypatch.setattr(store.database, "_once", never_committed)
        with pytest.raises(Conflict, match="was approved by bob"):
            await operations.approve(asked.id, by="ann")


async def test_a_finish_locks_its_key_before_its_quota(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    """As a claim does: one of a second message with the key may have it, and ask for the quota."""
    quota = Quota(name="all", window_s=3600.0, limits=Limits(runs=10))
    store.quotas_of = lambda _: (quota,)
    (verdict,) = await store.claim(SUB, [candidate("a", idempotency_key="k")], worker=worker)
    assert verdict.run is not None
    with psycopg.connect(postgres_url) as claim:
        claim.execute("SELECT 1 FROM idempotency_keys FOR UPDATE")
        finishing = asyncio.create_task(store.finish([done(verdict.run)], worker=worker))
        await until(lambda: rows(postgres_url, WAITS, "transactionid") == [(1,)], "it waits")
        claim.execute("SELECT 1 FROM quotas FOR UPDATE NOWAIT")
    assert await finishing == [Commit.COMMITTED]


async def test_a_begun_effect_whose_answer_is_lost_is_new(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
    assert verdict.run is not None
    LostAnswers(store.database, monkeypatch, 1)
    assert await store.effect_begin(verdict.run, "pay") == (EffectState.NEW, None)
    assert (await store.effect_begin(verdict.run, "pay"))[0] is EffectState.UNKNOWN


async def test_chains_stay_whole_whatever_answers_are_lost(
    store: PostgresStore,
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
    postgres_url: str,
    tmp_path: Path,
) -> None:
    for n in range(12):
        if n % 3:
            LostAnswers(store.database, monkeypatch, n % 3)
        batch = [candidate(f"{n}-{m}", tenant_id=f"t{m % 2}") for m in range(4)]
        verdicts = await store.claim(SUB, batch, worker=worker)
        runs = [v.run for v in verdicts if v.run is not None]
        assert len(runs) == 4
        await store.finish([done(run) for run in runs], worker=worker)
    report = verify_ledger(postgres_url, b"k" * 32, tmp_path / "anchors")
    assert report.ok, [str(each) for each in report.findings]
    assert report.events == 12 * 8


async def test_crossing_batches_all_get_through(postgres_url: str) -> None:
    """Four workers ask for the same messages and keys in different orders, over and over."""
    stores = [PostgresStore(postgres_url) for _ in range(4)]
    for each in stores:
        await each.open()
    workers = [await each.register("crossing") for each in stores]
    granted: list[str] = []

    async def one(n: int) -> None:
        for turn in range(15):
            names = [f"m{turn}-{m}" for m in range(30)]
            if n % 2:
                names.reverse()
            batch = [candidate(name, idempotency_key=f"k{name[-1]}{turn}") for name in names]
            verdicts = await stores[n].claim(SUB, batch, worker=workers[n])
            runs = [v.run for v in verdicts if v.run is not None]
            granted.extend(run.message.id for run in runs)
            commits = await stores[n].finish([done(run) for run in runs], worker=workers[n])
            assert set(commits) <= {Commit.COMMITTED}

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(n) for n in range(4)))
        for _ in range(10):
            await stores[0].resolve(worker=workers[0])
    assert len(granted) == len(set(granted))
    ended = "SELECT status, count(*) FROM queue_executions GROUP BY 1 ORDER BY 1"
    assert rows(postgres_url, ended) == [("duplicate", 15 * 20), ("succeeded", 15 * 10)]
    for each in stores:
        await each.close()


@pytest.mark.parametrize("bad", ["a\0b", "x" * 300])
async def test_a_message_that_no_row_can_hold_harms_no_other(
    store: PostgresStore, worker: Worker, postgres_url: str, bad: str
) -> None:
    good = [candidate(f"g{n}") for n in range(6)]
    broken = candidate("bad")
    assert broken.message is not None
    broken = msgspec.structs.replace(
        broken, message=msgspec.structs.replace(broken.message, idempotency_key=bad)
    )
    verdicts = await store.claim(SUB, [*good[:3], broken, *good[3:]], worker=worker)
    assert [v.answer for v in verdicts] == [
        *[Answer.RUN] * 3, Answer.DEAD, *[Answer.RUN] * 3,
    ]  # fmt: skip
    ((reason, body),) = rows(postgres_url, "SELECT reason, body FROM dead_letters")
    assert reason == "unstorable"
    assert bytes(body) == broken.delivery.body


async def test_what_a_dead_number_claimed_is_reaped_all_the_same(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    """Its claim was committed just after it was declared dead."""
    other = await store.register("other")
    await store.claim(SUB, [candidate("a")], worker=worker)
    with psycopg.connect(postgres_url) as conn:
        conn.execute("UPDATE workers SET state = 'dead' WHERE worker_id = %s", (worker.worker_id,))
    found = await store.reap(worker=other, lease_s=1.0, crash_budget=3)
    assert found.tasks == 1
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=other)
    assert verdict.answer is Answer.RUN
    with pytest.raises(StoreUnavailable, match="declared dead"):
        await store.claim(SUB, [candidate("b")], worker=worker)


async def reaped(store: PostgresStore, reaper: Worker, lease_s: float = 1.0) -> list[int]:
    found = await store.reap(worker=reaper, lease_s=lease_s, crash_budget=3)
    return list(found.workers)


async def test_nobody_is_reaped_while_the_store_has_just_come_back(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    other = await store.register("other")
    silence(store, postgres_url, worker)
    await store.database._lost()
    assert not await reaped(store, other, lease_s=3600.0)


async def test_nobody_is_reaped_while_the_server_takes_no_signs_of_life(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    """It stood still and closed no connection: everybody is silent, and so is the reaper."""
    other = await store.register("other")
    silence(store, postgres_url, worker)
    store._leases._taken -= 9.0
    assert not await reaped(store, other), "its own sign of life is late"
    store.beat(other)
    assert not await reaped(store, other), "the others have had no time to give theirs"
    store._leases._missed -= 11.0
    assert await reaped(store, other) == [worker.worker_id]


async def test_nobody_is_reaped_when_another_server_has_just_taken_over(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    """It was started again, or is a standby; no connection of this process broke."""
    other = await store.register("other")
    await reaped(store, other)
    silence(store, postgres_url, worker)
    store._watch._server = "the one before"
    assert not await reaped(store, other, lease_s=3600.0)
    store._watch._server_since -= 3600.0
    assert await reaped(store, other, lease_s=3600.0) == [worker.worker_id]


async def test_a_sign_of_life_after_the_look_counts(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    """Between the look and the verdict the server stood still, or the worker woke up."""
    other = await store.register("other")
    silence(store, postgres_url, worker)
    ((old,),) = rows(postgres_url, "SELECT beat FROM workers WHERE worker_id = %s",
                     worker.worker_id)  # fmt: skip
    store.beat(worker)
    for beat, gone in ((old, []), (old + 1, [worker.worker_id])):
        silent = [leases.Sign(worker.worker_id, beat)]
        found = await store.write(
            lambda tx, _, silent=silent: leases.missing(tx, other, silent, 10.0, []),  # type: ignore[misc]
            worker_id=other.worker_id,
        )
        assert [each.worker_id for each in found] == gone


_SLOW_COMMIT = """
CREATE FUNCTION sit_down() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_sleep(60);
  RETURN NULL;
EXCEPTION WHEN query_canceled THEN
  RETURN NULL;
END$$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON queue_executions
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION sit_down();
"""


async def test_a_claim_that_was_committed_after_we_gave_up_waiting_is_ours(
    store: PostgresStore, worker: Worker, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stood still for just as long as a call may take. Whoever asks again must get the
    claim: nobody else would ever run a message that a living worker has."""
    with psycopg.connect(postgres_url) as conn:
        conn.execute(_SLOW_COMMIT)
    monkeypatch.setattr(database, "CALL_S", 1.0)
    (verdict,) = await store.claim(SUB, [candidate("a")], worker=worker)
    assert verdict.answer is Answer.RUN
    with psycopg.connect(postgres_url) as conn:
        rows = conn.execute("SELECT status, attempt FROM queue_executions").fetchall()
    assert rows == [("running", 1)]


async def test_many_runs_share_a_few_connections(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    batch = [candidate(f"m{n}") for n in range(200)]
    runs = [v.run for v in await store.claim(SUB, batch, worker=worker) if v.run is not None]
    most = 0

    async def count() -> None:
        nonlocal most
        busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        while True:
            found = await asyncio.to_thread(rows, postgres_url, busy)
            most = max(most, found[0][0])

    counting = asyncio.create_task(count())
    async with asyncio.timeout(60):
        await asyncio.gather(*(store.heartbeat(run, {"n": 1}) for run in runs))
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)
    assert rows(postgres_url, "SELECT count(*) FROM event_log WHERE event_type = 'task.heartbeat'"
                ) == [(200,)]  # fmt: skip
    assert 1 < most <= WRITERS + READERS + 4, (
        "its own, the listener, the pulse and the one who counts"
    )


async def test_other_processes_are_woken(postgres_url: str, store: PostgresStore) -> None:
    other = PostgresStore(postgres_url)
    await other.open()
    heard = other.subscribe()
    worker = await store.register("w")
    async with asyncio.timeout(20):
        while not heard.is_set():  # until it listens
            lanes_of = Subscription(name="l", queue="l")
            message = candidate(f"m{next(_tags)}", ordering_key="a")
            await store.adopt_in_order(lanes_of, [message], worker=worker)
            with_in = asyncio.create_task(heard.wait())
            await asyncio.wait({with_in}, timeout=0.5)
            with_in.cancel()
    await other.close()


async def test_closing_ends_though_a_cancellation_gets_lost(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the driver may lose it, on Python below 3.12, while it connects."""
    connect = store.database.connect
    asked = asyncio.Event()

    async def losing() -> Any:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await connect()

    monkeypatch.setattr(store.database, "connect", losing)
    wake_ups = WakeUps(store.database)
    wake_ups.start()
    await asyncio.wait_for(asked.wait(), LOCK_TIMEOUT_S)
    await asyncio.wait_for(wake_ups.stop(), LOCK_TIMEOUT_S)


async def test_months_are_made_ahead(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    last = "SELECT max(relname) FROM pg_class WHERE relname ~ '^event_log_2' AND relkind = 'r'"
    ((name,),) = rows(postgres_url, last)
    with psycopg.connect(postgres_url) as conn:
        conn.execute(f"DROP TABLE {name}")
    months = PartitionMaker(store)
    assert await months.step(worker) == 1
    assert await months.step(worker) == 0
    assert rows(postgres_url, "SELECT to_regclass(%s) IS NOT NULL", name) == [(True,)]


async def test_who_writes_while_its_month_is_made_is_not_taken_for_unstorable(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    """Its events were on their way to the default partition, which must not have them any more."""
    now = "date_trunc('month', clock_timestamp(), 'UTC')"
    this = f"SELECT to_char({now}, '\"event_log_\"YYYY_MM')"
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND wait_event_type = 'Lock'"
    )
    ((name,),) = rows(postgres_url, this)
    with psycopg.connect(postgres_url) as maker:
        maker.execute(f"DROP TABLE {name}")
        maker.commit()
        assert make_partitions(maker) == 1
        claiming = asyncio.create_task(store.claim(SUB, [candidate("a")], worker=worker))
        await until(lambda: rows(postgres_url, waiting) == [(1,)], "the claim waits for the month")
        maker.commit()
    (verdict,) = await claiming
    assert verdict.answer is Answer.RUN
    assert rows(postgres_url, "SELECT count(*) FROM dead_letters") == [(0,)]
    assert rows(postgres_url, f"SELECT event_type FROM {name}") == [("task.claimed",)]


IO_ERROR = """
CREATE FUNCTION io_error() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'could not read block 7' USING ERRCODE = '58030'; END$$;
CREATE TRIGGER io_error BEFORE UPDATE ON queue_executions
FOR EACH ROW WHEN (NEW.status = 'succeeded') EXECUTE FUNCTION io_error();
"""


async def test_a_bad_disk_of_the_server_is_no_fault_of_a_run(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    """It succeeded: it waits until that can be written."""
    verdicts = await store.claim(SUB, [candidate("a"), candidate("b")], worker=worker)
    ends = [done(verdict.run) for verdict in verdicts if verdict.run is not None]
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute(IO_ERROR)
        with pytest.raises(StoreUnavailable, match="could not read block 7"):
            await store.finish(ends, worker=worker)
        conn.execute("DROP TRIGGER io_error ON queue_executions")
    assert await store.finish(ends, worker=worker) == [Commit.COMMITTED] * 2
    assert rows(postgres_url, "SELECT count(*) FROM dead_letters") == [(0,)]


# -- plans ----------------------------------------------------------------------------------------


def test_hot_statements_use_their_indexes(postgres_url: str) -> None:
    """With many rows, and a plan made while there were few."""
    hot = {
        "claim": (task_rows.FIND, 3),
        "ready": (task_rows.CLAIM_READY["all"], 6),
        "ready, some types only": (task_rows.CLAIM_READY["only"], 7),
        "ready, without some types": (task_rows.CLAIM_READY["but"], 7),
        "next due": (SQL.store.next_due, 2),
        "done": (task_rows.ALL_DONE, 9),
        "others": (task_rows.OTHERS, 20),
        "keep": (key_rows.KEEP, 6),
        "free": (key_rows.FREE, 4),
        "waiting": (key_rows.WAITING_FOR, 3),
        "stuck lanes": (SQL.claims.stuck, 0),
        "missing workers": (leases.LOOK, 1),
        "running of the gone": (SQL.workers.running_of_the_gone, 0),
        "suspects": (SQL.store.suspects_due, 1),
    }
    fill = (
        "INSERT INTO queue_executions (id, subscription, message_id, queue_name, status, held,"
        " worker_id, lane, lane_seq, idem_key, due_at) SELECT gen_random_uuid(), 's', 'm' || n,"
        " 'q', (ARRAY['succeeded', 'succeeded', 'running', 'ready', 'queued', 'waiting_key'])"
        "[1 + n %% 6], 'store', n %% 50, CASE WHEN n %% 6 = 4 THEN 'l' || n %% 100 END, n,"
        " 'k' || n, now() FROM generate_series(1, 20000) n"
    ).replace("%%", "%")
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute(fill)
        conn.execute(
            "INSERT INTO idempotency_keys (subscription, key, message_id, state) SELECT 's',"
            " 'k' || n, 'm' || n, 'done' FROM generate_series(1, 20000) n"
        )
        conn.execute("ANALYZE")
        for name, value in _SETTINGS.items():
            conn.execute("SELECT set_config(%s, %s, false)", (name, value))
        for what, (statement, parameters) in hot.items():
            conn.execute(f"PREPARE p AS {statement}")
            nulls = ", ".join(["NULL"] * parameters)
            call = f"EXECUTE p({nulls})" if parameters else "EXECUTE p"
            plan = "\n".join(row[0] for row in conn.execute(f"EXPLAIN {call}"))
            conn.execute("DEALLOCATE p")
            for table in ("queue_executions", "idempotency_keys"):
                assert f"Seq Scan on {table}" not in plan, f"{what}\n{plan}"
            if what in ("done", "others"):  # one row each, and not all that run
                assert "idx_queue_executions_tenant_message_id" in plan, f"{what}\n{plan}"
                assert "idx_tasks_running" not in plan, f"{what}\n{plan}"


def test_finishing_needs_no_statistics(postgres_url: str) -> None:
    """A plan that is made for an empty table, and kept, would read all of it for each row."""
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        for name, value in _SETTINGS.items():
            conn.execute("SELECT set_config(%s, %s, false)", (name, value))
        conn.execute(f"PREPARE p AS {task_rows.DONE_IN_PLACE}")
        nulls = ", ".join(["NULL"] * 10)
        plan = "\n".join(row[0] for row in conn.execute(f"EXPLAIN EXECUTE p({nulls})"))
    assert "Tid Scan on queue_executions" in plan, plan


async def test_a_row_that_moved_is_finished_all_the_same(
    store: PostgresStore, worker: Worker, postgres_url: str
) -> None:
    verdicts = await store.claim(SUB, [candidate(f"m{n}") for n in range(4)], worker=worker)
    runs = [v.run for v in verdicts if v.run is not None]
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        moved = "UPDATE queue_executions SET cancel_at = now() WHERE message_id IN ('m1', 'm2')"
        assert conn.execute(moved).rowcount == 2
        conn.execute("UPDATE queue_executions SET epoch = 9 WHERE message_id = 'm3'")
    commits = await store.finish([done(run) for run in runs], worker=worker)
    assert commits == [Commit.COMMITTED] * 3 + [Commit.FENCED]


# -- array literals -------------------------------------------------------------------------------

TEXTS = st.lists(st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8")))


@pytest.fixture(scope="session")
def plain(postgres: Any) -> Any:
    name = postgres.new_database()
    with psycopg.connect(postgres.url(name), autocommit=True) as conn:
        yield conn
    postgres.drop(name)


@given(values=TEXTS)
@settings(max_examples=200)
def test_texts_are_read_as_they_were(plain: Any, values: list[str | None]) -> None:
    (found,) = plain.execute("SELECT %s::text[]", (arrays.texts(values),)).fetchone()
    assert found == values


@given(values=st.lists(st.none() | st.binary()))
@settings(max_examples=100)
def test_bytes_are_read_as_they_were(plain: Any, values: list[bytes | None]) -> None:
    (found,) = plain.execute("SELECT %s::bytea[]", (arrays.blobs(values),)).fetchone()
    assert found == values


@given(at=st.integers(min_value=0, max_value=4_102_444_800_000_000))
@settings(max_examples=200)
def test_times_are_exact(plain: Any, at: int) -> None:
    sql = f"SELECT (extract(epoch FROM {arrays.moment('%s::bigint')}) * 1000000)::bigint"
    (found,) = plain.execute(sql, (at,)).fetchone()
    assert found == at


# -- two kinds of locks ---------------------------------------------------------------------------


async def test_two_processes_never_wait_for_each_others_ledger(postgres_url: str) -> None:
    """A finish of each process wants a key that a claim of the other holds, while that claim wants
    its own ledger: no database would see that they wait in a circle."""
    stores = [PostgresStore(postgres_url) for _ in range(2)]
    for each in stores:
        await each.open()
    workers = [await each.register("circle") for each in stores]

    async def one(n: int) -> None:
        store, worker = stores[n], workers[n]
        finishing: asyncio.Task[Any] | None = None
        for turn in range(40):
            batch = [
                candidate(f"{n}-{turn}-{m}", idempotency_key=f"k{(turn + m) % 12}")
                for m in range(8)
            ]
            verdicts = await store.claim(SUB, batch, worker=worker)
            runs = [v.run for v in verdicts if v.run is not None]
            if finishing is not None:
                await finishing
            ends = [Finished(run=run, outcome=Done(), dedup_window_s=0.0) for run in runs]
            finishing = asyncio.create_task(_finished(store, ends, worker))
        if finishing is not None:
            await finishing

    started = asyncio.get_running_loop().time()
    await asyncio.gather(one(0), one(1))
    took = asyncio.get_running_loop().time() - started
    assert took < LOCK_TIMEOUT_S, f"it took {took:.1f} s: somebody waited until a lock was given up"
    for each in stores:
        await each.close()


async def _finished(store: PostgresStore, ends: list[Finished], worker: Worker) -> None:
    if ends:
        await store.finish(ends, worker=worker)


async def test_what_is_claimed_after_an_end_is_told_as_later(
    store: PostgresStore, worker: Worker, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    """A claim that was begun before the end, and looked after it: its event says when it looked."""
    ordered = Subscription(name="o", queue="q", ordered=True)
    lane = [candidate(name, ordering_key="chat") for name in ("first", "second")]
    assert await store.adopt_in_order(ordered, lane, worker=worker) is not None
    (verdict,) = await store.claim_ready(ordered, limit=10, worker=worker)
    assert verdict.run is not None
    begun, over = asyncio.Event(), asyncio.Event()
    before = PostgresGrantedRuns.held_by_store

    async def held_up(self: Any, claim: Any) -> Any:
        await claim.tx.moment()
        begun.set()
        await over.wait()
        return await before(self, claim)

    monkeypatch.setattr(PostgresGrantedRuns, "held_by_store", held_up)
    late = asyncio.create_task(store.claim_ready(ordered, limit=10, worker=worker))
    await begun.wait()
    other = PostgresStore(postgres_url)  # another process: it has a memory of its own
    await other.open()
    try:
        assert await other.finish([done(verdict.run)], worker=worker) == [Commit.COMMITTED]
    finally:
        await other.close()
    over.set()
    (second,) = await late
    assert second.run is not None
    assert second.run.message.id == "second"
    times = dict(
        rows(
            postgres_url,
            "SELECT event_type || ' ' || task_id, created_at FROM event_log"
            " WHERE event_type IN ('task.claimed', 'task.succeeded')",
        )
    )
    assert times["task.succeeded first"] < times["task.claimed second"]


# -- the server's clock ---------------------------------------------------------------------------


@pytest.fixture
async def clocked(postgres_url: str) -> AsyncIterator[tuple[ServerClock, list[PostgresStore]]]:
    """Three processes on a server whose clock the test sets."""
    clock = ServerClock(postgres_url)
    stores = [PostgresStore(postgres_url, clock=clock) for _ in range(3)]
    for each in stores:
        await each.open()
    yield clock, stores
    for each in stores:
        await each.close()
    clock.close()


def waits_s(url: str, clock: ServerClock) -> float:
    ((due,),) = rows(url, "SELECT due_at FROM queue_executions WHERE status = 'ready'")
    return (to_us(due) - clock.now_us()) / 1e6


async def test_a_jump_moves_what_waits_once(
    clocked: tuple[ServerClock, list[PostgresStore]], postgres_url: str
) -> None:
    clock, (first, second, late) = clocked
    workers = [await first.register("first"), await second.register("second")]
    (verdict,) = await first.claim(SUB, [candidate("m")], worker=workers[0])
    assert verdict.run is not None
    again = Finished(run=verdict.run, outcome=Retry(5.0, "again"), result=None)
    await first.finish([again], worker=workers[0])

    async def look(*stores: PostgresStore) -> None:
        await asyncio.gather(
            *(each.reap(worker=workers[0], lease_s=10.0, crash_budget=3) for each in stores)
        )

    clock.jump_wall(3600)
    await look(first, second)
    assert waits_s(postgres_url, clock) == 5.0
    assert (first.clock_jumps, second.clock_jumps) == (1, 1)
    clock.jump_wall(-600)
    workers.append(await late.register("late"))  # by the new clock, before what waits has moved
    assert waits_s(postgres_url, clock) == 605.0
    await look(first)
    await look(second, late)
    assert waits_s(postgres_url, clock) == 5.0
    assert late.clock_jumps == 0
    clock.jump_wall(86_400)
    await look(late)
    await look(first, second)
    assert waits_s(postgres_url, clock) == 5.0
    assert not await first.claim_ready(SUB, limit=9, worker=workers[0])
    clock.advance(6)
    assert len(await second.claim_ready(SUB, limit=9, worker=workers[1])) == 1


async def test_a_process_that_looks_after_days_takes_drift_for_no_jump(
    clocked: tuple[ServerClock, list[PostgresStore]], postgres_url: str
) -> None:
    clock, (store, idle, _) = clocked
    worker = await store.register("first")
    await idle.register("idle")
    (verdict,) = await store.claim(SUB, [candidate("m")], worker=worker)
    assert verdict.run is not None
    for _ in range(10):
        clock.advance(86_400)
        clock.jump_wall(0.5)
        await store.reap(worker=worker, lease_s=10.0, crash_budget=3)
    again = Finished(run=verdict.run, outcome=Retry(60.0, "again"), result=None)
    await store.finish([again], worker=worker)
    await idle.register("again")
    assert (waits_s(postgres_url, clock), idle.clock_jumps) == (60.0, 0)
    clock.jump_wall(-30)
    await idle.register("at once")
    assert (waits_s(postgres_url, clock), idle.clock_jumps) == (60.0, 1)


class SetMeanwhile:
    """The server's clock is set once, right after the next transaction was begun."""

    def __init__(self, clock: ServerClock, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = database.Tx.begin

        async def begun(tx: database.Tx, worker_id: int, *, durable: bool) -> None:
            await begin(tx, worker_id, durable=durable)
            await tx.moment()
            monkeypatch.setattr(database.Tx, "begin", begin)
            clock.jump_wall(seconds)

        monkeypatch.setattr(database.Tx, "begin", begun)


async def test_what_a_transaction_wrote_while_the_clock_was_set_is_due_as_before(
    clocked: tuple[ServerClock, list[PostgresStore]],
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was begun before the jump, so what it wrote moves: by the new clock it would be a day
    late."""
    clock, (store, *_) = clocked
    worker = await store.register("first")
    (verdict,) = await store.claim(SUB, [candidate("m")], worker=worker)
    assert verdict.run is not None
    SetMeanwhile(clock, 86_400, monkeypatch)
    again = Finished(run=verdict.run, outcome=Retry(5.0, "again"), result=None)
    await store.finish([again], worker=worker)
    await store.reap(worker=worker, lease_s=10.0, crash_budget=3)
    assert waits_s(postgres_url, clock) == 5.0


async def test_a_key_is_not_forgotten_by_a_claim_while_the_clock_is_set(
    clocked: tuple[ServerClock, list[PostgresStore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, (store, *_) = clocked
    worker = await store.register("first")
    (first,) = await store.claim(SUB, [candidate("m", idempotency_key="k")], worker=worker)
    assert first.run is not None
    await store.finish([done(first.run)], worker=worker)
    SetMeanwhile(clock, 365 * 86_400, monkeypatch)
    (second,) = await store.claim(SUB, [candidate("n", idempotency_key="k")], worker=worker)
    assert second.answer is Answer.DUPLICATE


async def test_a_chain_goes_on_though_the_clock_was_set_back_before_its_first_event(
    clocked: tuple[ServerClock, list[PostgresStore]], postgres_url: str
) -> None:
    """After a lost connection its end is looked for among events since the worker registered."""
    clock, (store, *_) = clocked
    worker = await store.register("first")
    clock.jump_wall(-3600)
    await store.claim(SUB, [candidate("a")], worker=worker)
    store._ledger._doubt()
    await store.claim(SUB, [candidate("b")], worker=worker)
    assert rows(postgres_url, "SELECT seq FROM event_log ORDER BY seq") == [(1,), (2,)]


async def test_send_windows_move_with_the_clock(
    clocked: tuple[ServerClock, list[PostgresStore]], postgres_url: str
) -> None:
    clock, (store, *_) = clocked
    worker = await store.register("first")
    state = '{"calls": {"a": 7, "b": 9}, "blocked_until": 5}'
    with psycopg.connect(postgres_url) as conn:
        conn.execute(
            "INSERT INTO send_windows (key, state, ends_at) VALUES ('k', %s, now()),"
            " ('none', '{\"calls\": {}, \"blocked_until\": 0}', now())",
            (state,),
        )
    clock.jump_wall(-2)
    await store.reap(worker=worker, lease_s=10.0, crash_budget=3)
    found = dict(rows(postgres_url, "SELECT key, state FROM send_windows"))
    by = -2_000_000
    assert found["k"] == {
        "calls": {"a": 7 + by, "b": 9 + by}, "blocked_until": 5 + by, "back_until": by,
    }  # fmt: skip
    assert found["none"]["calls"] == {}


async def test_what_is_held_back_does_not_leave_early(
    clocked: tuple[ServerClock, list[PostgresStore]], postgres_url: str
) -> None:
    """The first look at the outbox after a jump comes before any other."""
    clock, (store, *_) = clocked
    await store.register("first")
    with psycopg.connect(postgres_url) as conn:
        conn.execute(
            "INSERT INTO outbox (id, queue_name, message_id, headers, body, body_crc, due_at,"
            " created_at) VALUES (gen_random_uuid(), 'q', 'm', '{}', '', 0,"
            " fake.clock_timestamp() + interval '1 minute', fake.clock_timestamp())"
        )
    outbox = Outbox(store, lambda queue: MemoryBroker(), codec_of=lambda queue: "standard")
    clock.jump_wall(3600)
    assert await outbox.due_rows(10) == []
    clock.advance(59)
    assert await outbox.due_rows(10) == []
    clock.advance(2)
    assert len(await outbox.due_rows(10)) == 1
