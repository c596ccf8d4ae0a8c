"""A trigger that lives long: its ledger is anchored, and what is old in its store goes."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ackbone import QueueTrigger
from ackbone.config import Config, Retention
from ackbone.store.ledger import ledger_key
from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.store import SqliteStore
from ackbone.store.sqlite.verify import verify_ledger
from tests.faults.waiting import until
from tests.integration.test_queue_trigger import Kit, raw


def make_old(path: Path) -> None:
    """A database with a task and a count of last century."""
    ensure_schema(path)
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute(
            "INSERT INTO queue_executions (id, tenant_id, subscription, message_id, queue_name,"
            " status, held, started_at, completed_at)"
            " VALUES (x'00', 'acme', 'q', 'old', 'q', 'succeeded', 'store', 0, 0)"
        )
        conn.execute(
            "INSERT INTO queue_metrics (id, tenant_id, queue_name, metric_name, metric_value,"
            " timestamp) VALUES (x'00', 'acme', 'q', 'm', 1, 0)"
        )


def old(path: Path, table: str) -> int:
    """How many of them are still there."""
    with closing(sqlite3.connect(path)) as conn:
        found = conn.execute(f"SELECT count(*) FROM {table} WHERE id = x'00'").fetchone()[0]
    return int(found)


async def run_until(trigger: QueueTrigger, done: Callable[[], bool]) -> None:
    await trigger.start()
    try:
        await until(done, "the trigger did what it should")
    finally:
        await trigger.stop()


@pytest.mark.parametrize("given", ["path", "config"])
async def test_its_store_is_anchored_and_what_is_old_goes(home: Path, given: str) -> None:
    path = home / "trigger.db"
    make_old(path)
    config = Config(home=home / "elsewhere", store=f"sqlite:///{path}")
    keys = home if given == "path" else home / "elsewhere"
    kit = Kit()
    kit.adapter.enqueue(raw("a"))
    trigger = kit.trigger(store=path if given == "path" else config)
    await run_until(
        trigger, lambda: not old(path, "queue_metrics") and kit.runtime.events.count == 1
    )
    assert old(path, "queue_executions") == 0
    report = verify_ledger(path, ledger_key(keys / "ledger.key"), keys / "ledger.anchors")
    assert report.ok, report.findings
    assert report.anchors > 0
    assert report.not_yet_anchored <= 1, "the last anchor itself"


async def test_what_is_kept_is_the_configurations_to_say(home: Path) -> None:
    path = home / "trigger.db"
    make_old(path)
    kept = Retention(tasks_days=None)
    trigger = Kit().trigger(store=Config(home=home, store=f"sqlite:///{path}", retention=kept))
    await run_until(trigger, lambda: not old(path, "queue_metrics"))  # the last to be looked at
    assert old(path, "queue_executions") == 1


async def test_a_store_that_was_open_already_is_its_owners_to_keep(home: Path) -> None:
    """Who opened it knows its key and how long things are kept; a guess would spoil both."""
    path = home / "trigger.db"
    make_old(path)
    store = SqliteStore(path)
    await store.open()
    try:
        kit = Kit()
        kit.adapter.enqueue(raw("a"))
        trigger = kit.trigger(store=store)
        await run_until(trigger, lambda: kit.runtime.events.count == 1)
    finally:
        await store.close()
    assert old(path, "queue_metrics") == 1
    assert not (home / "ledger.key").exists()
