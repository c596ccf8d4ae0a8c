"""The checker is worth what it finds: a clean history passes, each planted fault is named."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from ackbone.app import App
from ackbone.config import load_config
from ackbone.core.clock import SystemClock
from ackbone.engine.context import Context
from ackbone.store.ledger import GENESIS, ledger_key, link
from ackbone.store.sqlite.verify import verify_ledger
from tests.faults.checker import Fault, Kill, Report, Sent, Story, check
from tests.faults.history import History
from tests.faults.oracle import Effect, Oracle, times

pytestmark = pytest.mark.xdist_group("faults-1")

Database = sqlite3.Connection


class Recorded:
    """A real run of a few messages, and everything that its senders and its oracle know."""

    def __init__(self, home: Path) -> None:
        self.oracle = Oracle(home / "effects")
        self.app = App(
            load_config(
                environ={},
                overrides={"home": str(home), "retry.base_delay_s": 0.01, "worker.lease_s": 2},
            )
        )
        self.sent: list[Sent] = []
        self.effects: list[Effect] = []
        self.kills: list[Kill] = []
        self.database = home / "ackbone.db"

        @self.app.on("work", retries=1)
        async def work(ctx: Context) -> dict[str, int]:
            if ctx.payload["fail"] > ctx.retry_count:
                raise RuntimeError("as planned")
            self.oracle.record(ctx.idempotency_key, ctx.message.id, ctx.attempt)
            await ctx.reply("done")
            return {"n": ctx.payload["n"]}

    async def run(self) -> None:
        async with self.app:
            for n in range(20):
                key = f"key-{n // 2}"  # each key twice: half of the messages are duplicates
                lane = f"chat-{n % 3}" if n >= 10 else None
                receipt = await self.app.send(
                    "work",
                    {"n": n, "fail": {4: 1, 16: 2}.get(n, 0)},
                    id=f"m-{n}",
                    idempotency_key=key,
                    ordering_key=lane,
                )
                self.sent.append(Sent(id=receipt.id, key=key, conversation=lane))
        await asyncio.wait_for(self.app.work(until_idle=True), 60)
        self.effects = self.oracle.effects()

    def plant(self, change: Callable[[Database], object]) -> None:
        with closing(sqlite3.connect(self.database, isolation_level=None)) as conn:
            change(conn)

    def report(self, **known: object) -> Report:
        return check(
            Story(
                history=History(self.database),
                sent=self.sent,
                effects=self.effects,
                kills=self.kills,
                ledger=verify_ledger(
                    self.database,
                    ledger_key(self.app.config.ledger_key_file),
                    self.app.config.ledger_anchor_file,
                ),
                replies_per_run=1,
                reclaim_limit_s=2.0,
                **known,  # type: ignore[arg-type]
            ),
            seed=7,
        )

    def faults(self, **known: object) -> set[Fault]:
        return {finding.fault for finding in self.report(**known).findings}


@pytest.fixture
async def recorded(home: Path) -> Recorded:
    found = Recorded(home)
    await found.run()
    return found


def append(conn: Database, task_id: str, event_type: str, data: str = "{}", at_us: int = 0) -> None:
    """An event with a good link, so that the ledger itself has nothing to say."""
    worker_id, seq, previous = conn.execute(
        "SELECT worker_id, seq, hash FROM event_log WHERE tenant_id = 'default'"
        " ORDER BY rowid DESC LIMIT 1"
    ).fetchone()
    record = (seq + 1, "default", "default", task_id, event_type, data, at_us, worker_id)
    conn.execute(
        "INSERT INTO event_log (id, tenant_id, subscription, task_id, event_type, data,"
        " created_at, worker_id, seq, hash)"
        " VALUES (x'00', 'default', 'default', ?, ?, ?, ?, ?, ?, ?)",
        (task_id, event_type, data, at_us, worker_id, seq + 1, link(previous, record)),
    )


def reclaim(conn: Database, *, worker_id: int, at_us: int) -> None:
    append(conn, "m-2", "task.lost", f'{{"worker":{worker_id}}}', at_us)


def set_status(status: str, message_id: str, **columns: object) -> Callable[[Database], object]:
    names = "".join(f", {name} = ?" for name in columns)

    def change(conn: Database) -> None:
        found = conn.execute(
            f"UPDATE queue_executions SET status = ?{names} WHERE message_id = ?",
            (status, *columns.values(), message_id),
        )
        assert found.rowcount == 1

    return change


def rewritten(conn: Database, where: str, change: str) -> None:
    """Drop or move events, and chain the rest anew. Only the anchors tell that from the truth."""
    conn.execute(f"{change} WHERE {where}")
    conn.execute("CREATE TEMP TABLE kept AS SELECT * FROM event_log ORDER BY worker_id, seq, rowid")
    heads: dict[tuple[str, int], tuple[int, bytes]] = {}
    for rowid, *row in conn.execute(
        "SELECT rowid, tenant_id, subscription, task_id, event_type, data, created_at, worker_id"
        " FROM event_log ORDER BY rowid"
    ).fetchall():
        chain = (row[0], row[-1])
        seq, previous = heads.get(chain, (0, GENESIS))
        digest = link(previous, (seq + 1, *row))
        heads[chain] = (seq + 1, digest)
        conn.execute(
            "UPDATE event_log SET seq = ?, hash = ? WHERE rowid = ?", (seq + 1, digest, rowid)
        )


async def test_a_clean_history_passes(recorded: Recorded) -> None:
    report = recorded.report()
    assert report.ok, report.table()
    assert report.sent == 20
    # Message 16 fails for good, so that its key goes to message 17.
    assert report.ends == {"task.succeeded": 10, "task.duplicate": 9, "task.failed": 1}
    assert "seed 7 | 20 sent" in report.table()
    assert "LOST 0 | DOUBLE 0 | GHOST 0" in report.table()
    assert set(times(recorded.effects).values()) == {1}


async def test_a_message_that_vanished_is_lost(recorded: Recorded) -> None:
    recorded.sent.append(Sent(id="never-stored"))
    report = recorded.report()
    assert [f.subject for f in report.findings] == ["never-stored"]
    assert report.count(Fault.LOST) == 1
    assert "LOST never-stored: accepted, no final event (nowhere)" in report.table()


async def test_a_lost_final_event_is_found(recorded: Recorded) -> None:
    recorded.plant(
        lambda conn: rewritten(
            conn, "task_id = 'm-2' AND event_type = 'task.succeeded'", "DELETE FROM event_log"
        )
    )
    assert recorded.faults() >= {Fault.LOST, Fault.CHAIN}


async def test_an_unanswered_send_need_not_exist(recorded: Recorded) -> None:
    recorded.sent.append(Sent(id="timed-out"))
    assert recorded.report(unsure={"timed-out"}).ok


async def test_a_parked_message_is_lost_unless_it_may_be_parked(recorded: Recorded) -> None:
    recorded.plant(set_status("parked", "m-2"))
    recorded.plant(
        lambda conn: rewritten(
            conn, "task_id = 'm-2' AND event_type = 'task.succeeded'", "DELETE FROM event_log"
        )
    )
    recorded.plant(lambda conn: conn.execute("DELETE FROM deliveries WHERE task_id = 'm-2'"))
    assert recorded.faults() == {Fault.LOST, Fault.CHAIN}
    assert recorded.faults(may_park={"m-2"}) == {Fault.CHAIN}


async def test_a_second_final_event_is_a_double(recorded: Recorded) -> None:
    recorded.plant(lambda conn: append(conn, "m-2", "task.succeeded", '{"attempt":1}'))
    assert recorded.faults() == {Fault.DOUBLE}


async def test_an_end_that_its_row_denies_is_a_double(recorded: Recorded) -> None:
    recorded.plant(set_status("failed", "m-2"))
    assert recorded.faults() == {Fault.DOUBLE}


async def test_a_key_with_two_committed_runs_is_a_double(recorded: Recorded) -> None:
    recorded.sent = [
        Sent(id=sent.id, key="key-0", conversation=sent.conversation) if sent.id == "m-2" else sent
        for sent in recorded.sent
    ]
    report = recorded.report()
    assert [(f.fault, f.subject) for f in report.findings] == [(Fault.DOUBLE, "key-0")]


async def test_an_effect_without_a_message_is_a_ghost(recorded: Recorded) -> None:
    recorded.effects.append(Effect("key-x", "nobody-sent-it", 1, 1))
    assert recorded.faults() == {Fault.GHOST}


async def test_an_effect_of_an_attempt_that_was_never_claimed_is_a_ghost(
    recorded: Recorded,
) -> None:
    recorded.effects.append(Effect("key-1", "m-2", 9, 1))
    assert recorded.faults() == {Fault.GHOST}


async def test_a_commit_without_its_effect_is_hollow(recorded: Recorded) -> None:
    recorded.effects = [effect for effect in recorded.effects if effect.message_id != "m-2"]
    assert recorded.faults() == {Fault.HOLLOW}


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (set_status("running", "m-2", worker_id=1), "its worker 1 is left"),
        (set_status("running", "m-2", worker_id=None), "its worker None is unknown"),
        (set_status("open", "m-2"), "no broker holds a copy"),
        (set_status("queued", "m-19"), "it is the first of its conversation"),
        (set_status("waiting_key", "m-2"), "the key that it waits for is done"),
        (set_status("waiting_key", "m-2", idem_key="none"), "the key that it waits for is free"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_nobody_is_in_charge_of_is_stuck(
    recorded: Recorded, plant: Callable[[Database], object], why: str
) -> None:
    recorded.plant(plant)
    stuck = [f for f in recorded.report().findings if f.fault is Fault.STUCK]
    assert [why in finding.detail for finding in stuck] == [True]


async def test_a_taken_message_of_a_dead_worker_is_stuck(recorded: Recorded) -> None:
    recorded.plant(
        lambda conn: conn.execute(
            "INSERT INTO messages (queue, state, message_id, sent_at, worker_id, headers, body,"
            " body_crc) VALUES ('default', 2, 'm-99', 0, 1, '{}', x'00', 0)"
        )
    )
    assert recorded.faults() == {Fault.STUCK}


async def test_what_a_living_worker_runs_is_not_stuck(recorded: Recorded) -> None:
    recorded.plant(lambda conn: conn.execute("UPDATE workers SET state = 'alive'"))
    recorded.plant(set_status("running", "m-2", worker_id=1))
    assert Fault.STUCK not in recorded.faults()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM deliveries WHERE task_id = 'm-2'",
        "UPDATE deliveries SET task_id = 'm-0' WHERE task_id = 'm-2'",
        "INSERT INTO deliveries (id, tenant_id, subscription, task_id, channel, recipient, content,"
        " due_at, created_at) SELECT 'twice', tenant_id, subscription, task_id, channel, recipient,"
        " content, due_at, created_at FROM deliveries WHERE task_id = 'm-2'",
    ],
    ids=["missing", "moved", "twice"],
)
async def test_replies_are_counted(recorded: Recorded, statement: str) -> None:
    recorded.plant(lambda conn: conn.execute(statement))
    assert recorded.faults() == {Fault.REPLIES}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE event_log SET data = '{}' WHERE seq = 5",
        "UPDATE event_log SET created_at = created_at + 1 WHERE seq = 5",
        "DELETE FROM event_log WHERE seq = 5 AND event_type = 'task.claimed'",
        "UPDATE event_log SET seq = seq + 1 WHERE seq > 5",
        "UPDATE event_log SET hash = zeroblob(32) WHERE seq = 5",
    ],
    ids=["edited", "redated", "cut out", "renumbered", "other hash"],
)
async def test_a_broken_chain_is_found(recorded: Recorded, statement: str) -> None:
    recorded.plant(lambda conn: conn.execute(statement))
    assert Fault.CHAIN in recorded.faults()


async def test_an_overtaken_message_is_out_of_order(recorded: Recorded) -> None:
    """Claimed before the one before it had ended, the ledger being whole otherwise."""
    recorded.plant(
        lambda conn: rewritten(
            conn,
            "task_id = 'm-18' AND event_type = 'task.claimed'",
            "UPDATE event_log SET rowid = -1",
        )
    )
    report = recorded.report()
    found = [(f.fault, f.subject) for f in report.findings if f.fault is not Fault.CHAIN]
    assert found == [(Fault.ORDER, "chat-0")]


async def test_ends_in_the_wrong_order_are_found(recorded: Recorded) -> None:
    recorded.sent[10], recorded.sent[13] = recorded.sent[13], recorded.sent[10]
    assert recorded.faults() == {Fault.ORDER}


async def test_a_late_reclaim_is_found(recorded: Recorded) -> None:
    now_us = SystemClock().now_us()
    recorded.kills = [Kill(worker_id=77, at_us=now_us), Kill(worker_id=78, at_us=now_us)]
    for micros in (500_000, 1_500_000):
        recorded.plant(partial(reclaim, worker_id=77, at_us=now_us + micros))
    report = recorded.report()
    assert report.ok
    assert (report.kills, report.busy_kills) == (2, 1)
    assert report.reclaims_s == pytest.approx([0.5, 1.5])
    recorded.plant(partial(reclaim, worker_id=78, at_us=now_us + 2_100_000))
    assert recorded.faults() == {Fault.LATE}


def test_a_line_that_a_kill_cut_short_did_not_happen(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "effects")
    assert oracle.effects() == []
    oracle.record("k", "m", 1)
    with oracle.path.open("ab") as file:
        file.write(b'["k2","m2"')
    assert [(e.key, e.message_id, e.attempt) for e in oracle.effects()] == [("k", "m", 1)]
