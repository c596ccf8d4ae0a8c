"""Plans of the hot statements: none sorts, none reads a big table from end to end.

The statements are those that the protocol's model really runs, caught on their way to the
database, so that a new one is looked at without anybody thinking of it.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3

import pytest

from ackbone.sqlitefile.file import add_functions
from ackbone.sqlitefile.timebase import WAITING
from ackbone.store.sqlite import key_rows, task_rows
from ackbone.store.sqlite.delivery_rows import END
from ackbone.store.sqlite.sql import SQL
from tests.property.protocol_file import empty_database
from tests.property.protocol_world import Mode, World

BIG = (
    "queue_executions",
    "messages",
    "event_log",
    "idempotency_keys",
    "dead_letters",
    "deliveries",
    "effects",
    "approvals",
)
"""Tables that grow with every message."""
SMALL_INDEXES = (
    "idx_tasks_ready",
    "idx_tasks_running",
    "idx_tasks_waiting_key",
    "idx_tasks_lane",
    "idx_tasks_parked",
    "idx_messages_delayed",
    "idx_approvals_pending",
    "idx_deliveries_sending",
)
"""They hold only what is on its way, so a walk over one of them is a walk over that."""
ON_PURPOSE = "SELECT seq, hash FROM event_log NOT INDEXED"
"""The head of a chain, from the end of the ledger backwards: it stops at the first it finds."""
OF_THE_MODEL = re.compile(
    r"^(BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE)"
    # The model's own questions.
    r"|^SELECT (message_id, status, held|message_id, state FROM|worker_id, epoch, status FROM"
    r" queue_executions WHERE tenant_id = \? AND message_id|tenant_id, subscription, message_id,"
    r" parked_kind)"
)


@pytest.fixture(scope="module")
def statements() -> list[str]:
    """Everything that some stories send to the database."""
    seen: dict[str, None] = {}

    def note(sql: str) -> str:
        seen[sql] = None
        return sql

    for mode in Mode:
        for seed in range(15):
            world = World(seed, mode)
            world.file.conn.plant(note, None)
            asyncio.run(world.run())
            world.file.close()
    return [sql for sql in seen if not OF_THE_MODEL.match(sql) and not sql.startswith(ON_PURPOSE)]


def plan_of(conn: sqlite3.Connection, sql: str) -> list[str]:
    marks = 0
    for number in re.findall(r"\?(\d*)", sql):  # a plain mark counts on from the highest
        marks = max(marks, int(number)) if number else marks + 1
    add_functions(conn)
    rows = conn.execute(f"EXPLAIN QUERY PLAN {sql}", [None] * marks)
    return [str(row[3]) for row in rows]


def complaints(plan: list[str]) -> list[str]:
    found = [step for step in plan if "TEMP B-TREE" in step and "DISTINCT" not in step]
    for step in plan:
        table = re.match(r"SCAN (\w+)", step)
        small = any(index in step for index in SMALL_INDEXES)
        if table is not None and table.group(1) in (*BIG, "a", "b", "w") and not small:
            found.append(step)
    return found


def test_the_model_shows_the_hot_statements(statements: list[str]) -> None:
    text = "\n".join(statements)
    for part in (
        "SET status = 'running'",
        "SET status = 'succeeded'",
        "INSERT OR IGNORE INTO queue_executions",
        "INSERT INTO event_log",
        "DELETE FROM messages",
        "FROM messages WHERE queue",
    ):
        assert part in text, part
    assert len(statements) > 60


def test_paused_queues_are_found_beside_many_parts() -> None:
    conn = sqlite3.connect(":memory:")
    conn.deserialize(empty_database())
    assert "idx_sources_paused" in str(plan_of(conn, SQL.store.paused))
    conn.close()


def test_no_hot_statement_sorts_or_reads_a_big_table(statements: list[str]) -> None:
    conn = sqlite3.connect(":memory:")
    conn.deserialize(empty_database())
    bad = {}
    for sql in statements:
        found = complaints(plan_of(conn, sql))
        if found:
            bad[sql] = found
    conn.close()
    assert not bad, "\n".join(f"{sql}\n   {steps}" for sql, steps in bad.items())


def test_setting_the_clock_moves_only_what_waits() -> None:
    conn = sqlite3.connect(":memory:")
    conn.deserialize(empty_database())
    plans = [plan_of(conn, sql) for sql in WAITING]
    conn.close()
    assert not [step for plan in plans[:2] for step in complaints(plan)]


@pytest.mark.parametrize(
    "sql",
    [
        task_rows.APPROVED,
        SQL.maintenance.approvals_due,
        SQL.approvals.approve,
        SQL.approvals.reject,
        SQL.approvals.first_yes,
        SQL.approvals.expire,
        key_rows.READ,
        key_rows.WRITE,
        SQL.maintenance.look_at_quotas_again,
        SQL.records.quota_use,
    ],
)
def test_governance_reads_no_big_table(sql: str) -> None:
    conn = sqlite3.connect(":memory:")
    conn.deserialize(empty_database())
    plan = plan_of(conn, sql)
    conn.close()
    assert not complaints(plan), plan
    assert not [step for step in plan if step.startswith(("SCAN t", "SCAN a"))], plan


@pytest.mark.parametrize(
    "sql",
    [
        SQL.deliveries.levels,
        SQL.deliveries.due,
        SQL.deliveries.grant,
        SQL.deliveries.behind,
        END,
        SQL.deliveries.promote,
        SQL.deliveries.orphans,
        SQL.deliveries.take_back,
        SQL.deliveries.free,
        SQL.deliveries.queue,
        SQL.deliveries.expire,
    ],
)
def test_sending_reads_no_big_table(sql: str) -> None:
    """However many wait: what is due, and whose turn it is, stand in indexes, in order."""
    conn = sqlite3.connect(":memory:")
    conn.deserialize(empty_database())
    plan = plan_of(conn, sql)
    conn.close()
    assert not complaints(plan), plan
    assert not [step for step in plan if re.match(r"SCAN [desh]$", step)], plan


@pytest.mark.parametrize(
    "name",
    [
        "letters_by_id",
        "parked",
        "tasks",
        "tasks_like",
        "tenants_of_tasks",
        "tenants_of_events",
        "find_task",
        "find_tasks_like",
        "find_event",
        "find_events_like",
        "events_of",
        "replies_of",
        "queues",
        "unended",
        "running",
        "workers",
        "final_events",
    ],
)
def test_what_operators_ask_often_reads_no_big_table(name: str) -> None:
    """These statements may sort what they found. They must not read the whole history for it."""
    conn = sqlite3.connect(":memory:")
    conn.deserialize(empty_database())
    plan = plan_of(conn, getattr(SQL.records, name))
    conn.close()
    assert not [step for step in plan if re.match(rf"SCAN ({'|'.join(BIG)})$", step)], plan


def test_a_bad_plan_is_seen() -> None:
    conn = sqlite3.connect(":memory:")
    conn.deserialize(empty_database())
    sorts = "SELECT rowid FROM queue_executions WHERE status = 'ready' ORDER BY attempt"
    reads = "SELECT rowid FROM queue_executions WHERE worker_id = ?"
    assert complaints(plan_of(conn, sorts))
    assert complaints(plan_of(conn, reads))
    conn.close()
