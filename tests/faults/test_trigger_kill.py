"""A trigger's process is killed with everything running: the next one runs each message."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

from holdfast.brokers.sqlite import SqliteBroker
from holdfast.core.broker import Outgoing
from holdfast.store.migrate import ensure_schema

VICTIM = Path(__file__).with_name("trigger_victim.py")
PATIENCE_S = 60.0


async def start(folder: Path, mode: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, str(VICTIM), str(folder), mode, stdin=pipe, stdout=pipe
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


async def test_what_a_killed_trigger_ran_is_run_by_the_next_one(home: Path) -> None:
    for name in ("queue.db", "store.db"):
        ensure_schema(home / name)
    broker = SqliteBroker(home / "queue.db")
    await broker.open()
    batch = [
        Outgoing(id=f"m{n}", body=b"%d" % n, headers={"x-message-id": f"m{n}"}) for n in range(10)
    ]
    await broker.publish("orders", batch)

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
