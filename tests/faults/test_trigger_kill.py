"""A trigger's process is killed with everything running: the next one runs each message."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

import psycopg
import pytest
from redis import Redis

from ackbone.brokers.sqlite import SqliteBroker
from ackbone.core.broker import Outgoing
from ackbone.store.ledger import ledger_key
from ackbone.store.postgres.verify import verify_ledger
from ackbone.store.sqlite.migrate import ensure_schema
from tests.servers.redis import RedisServer

VICTIM = Path(__file__).with_name("trigger_victim.py")
PATIENCE_S = 60.0


async def start(folder: Path, mode: str, *store: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, str(VICTIM), str(folder), mode, *store, stdin=pipe, stdout=pipe
    )


async def lines(process: asyncio.subprocess.Process, count: int) -> list[list[str]]:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return [(await process.stdout.readline()).decode().split() for _ in range(count)]


async def end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    async with asyncio.timeout(PATIENCE_S):
        await process.wait()


async def filled_queue(home: Path) -> SqliteBroker:
    """Ten messages, m0 to m9."""
    for name in ("queue.db", "store.db"):
        ensure_schema(home / name)
    broker = SqliteBroker(home / "queue.db")
    await broker.open()
    batch = [
        Outgoing(id=f"m{n}", body=b"%d" % n, headers={"x-message-id": f"m{n}"}) for n in range(10)
    ]
    await broker.publish("orders", batch)
    return broker


async def test_what_a_killed_trigger_ran_is_run_by_the_next_one(home: Path) -> None:
    broker = await filled_queue(home)
    first = await start(home, "block")
    began = await lines(first, 4)
    first.kill()
    await first.wait()
    assert {line[0] for line in began} == {"began"}

    second = await start(home, "finish")
    told = Counter(line[0] for line in await lines(second, 30))
    assert told == {"began": 10, "finished": 10, "recorded": 10}
    await end(second)
    assert second.returncode == 0
    assert [queue for queue in await broker.stats() if queue.ready or queue.in_flight] == []
    rows = await broker.file.read(lambda conn: conn.execute("SELECT 1 FROM messages").fetchall())
    assert rows == []
    await broker.close()
    statuses, crashes = await asyncio.to_thread(outcome, home / "store.db")
    assert statuses == {"succeeded": 10}
    assert crashes == 4


@pytest.mark.xdist_group("postgres")
async def test_what_a_killed_trigger_ran_on_postgresql_is_run_by_the_next_one(
    home: Path, postgres_url: str
) -> None:
    broker = await filled_queue(home)
    first = await start(home, "block", postgres_url)
    began = await lines(first, 4)
    first.kill()
    await first.wait()
    assert {line[0] for line in began} == {"began"}

    second = await start(home, "finish", postgres_url)
    told = Counter(line[0] for line in await lines(second, 30))
    assert told == {"began": 10, "finished": 10, "recorded": 10}
    await end(second)
    assert second.returncode == 0
    assert [queue for queue in await broker.stats() if queue.ready or queue.in_flight] == []
    await broker.close()
    with psycopg.connect(postgres_url) as conn:
        ended = conn.execute(
            "SELECT status, sum(crashes), count(*) FROM queue_executions GROUP BY 1"
        )
        assert ended.fetchall() == [("succeeded", 4, 10)]
        finals = conn.execute(
            "SELECT count(*), count(DISTINCT task_id) FROM event_log"
            " WHERE event_type = 'task.succeeded'"
        )
        assert finals.fetchall() == [(10, 10)]
    report = verify_ledger(postgres_url, ledger_key(home / "ledger.key"), home / "ledger.anchors")
    assert report.ok, [str(each) for each in report.findings]


@pytest.mark.xdist_group("faults-redis")
async def test_a_recorded_result_whose_process_died_is_committed_and_not_run_again(
    home: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dedup memory knows of an end that the store never heard of: it is this message's own."""
    monkeypatch.setenv("REDIS_URL", redis_server.url)
    broker = await filled_queue(home)
    first = await start(home, "record")
    async with asyncio.timeout(PATIENCE_S):
        await first.wait()
    assert first.stdout is not None
    began = Counter(line.split()[0] for line in (await first.stdout.read()).splitlines())
    assert began[b"began"] >= 1
    with Redis.from_url(redis_server.url) as client:
        recorded = {key.decode().partition(":")[2] for key in client.keys("idempotency:*")}
    assert 1 <= len(recorded) <= 4

    second = await start(home, "finish")
    again = await lines(second, 30 - 2 * len(recorded))
    assert Counter(line[0] for line in again)["recorded"] == 10
    assert {line[1] for line in again if line[0] == "began"}.isdisjoint(recorded)
    await end(second)
    await broker.close()
    statuses, _ = await asyncio.to_thread(outcome, home / "store.db")
    assert statuses == {"succeeded": 10}


def outcome(path: Path) -> tuple[Counter[str], int]:
    import sqlite3

    conn = sqlite3.connect(path)
    try:
        rows = conn.execute("SELECT status, crashes FROM queue_executions").fetchall()
        finals = conn.execute(
            "SELECT count(*), count(DISTINCT task_id) FROM event_log"
            " WHERE event_type = 'task.succeeded'"
        ).fetchone()
    finally:
        conn.close()
    assert finals == (10, 10)
    return Counter(status for status, _ in rows), sum(crashes for _, crashes in rows)
