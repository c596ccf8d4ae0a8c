"""Asking whether there is anything left to do must not read through all that was done."""

from __future__ import annotations

import functools
import sqlite3
from pathlib import Path

from ackbone.store.sqlite.migrate import ensure_schema
from ackbone.store.sqlite.sql import SQL
from ackbone.store.sqlite.store import SqliteStore


async def test_asking_for_work_reads_no_history(home: Path) -> None:
    path = home / "ackbone.db"
    ensure_schema(path)
    with sqlite3.connect(path) as conn:
        plan = [row[3] for row in conn.execute(f"EXPLAIN QUERY PLAN {SQL.store.busy}", ('["q"]',))]
    conn.close()
    reads = [step for step in plan if "queue_executions" in step]
    assert len(reads) == 2, plan
    assert all("USING INDEX" in step or "USING COVERING INDEX" in step for step in reads), plan


async def test_it_sees_every_kind_of_work(home: Path) -> None:
    path = home / "ackbone.db"
    ensure_schema(path)
    store = SqliteStore(path)
    await store.open()
    try:
        assert await store.is_empty(["q"])
        for status in ("ready", "queued", "waiting_key", "open", "running"):
            await store.file.write(functools.partial(_task, status=status))
            assert not await store.is_empty(["q"]), status
            assert await store.is_empty(["another"]), status
            await store.file.write(lambda conn: conn.execute("DELETE FROM queue_executions"))
        for status in ("succeeded", "failed", "parked", "duplicate"):
            await store.file.write(functools.partial(_task, status=status))
        assert await store.is_empty(["q"])
    finally:
        await store.close()


def _task(conn: sqlite3.Connection, status: str) -> None:
    conn.execute(
        "INSERT INTO queue_executions (id, subscription, message_id, queue_name, status, held)"
        " VALUES (x'00', 'q', ?, 'q', ?, 'store')",
        (status, status),
    )
