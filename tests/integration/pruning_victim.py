"""Run by test_postgres_pruning.py as a process of its own: prunes in children that are killed.

    pruning_victim.py <url> <anchor file>

Each child kills itself before the first statement that no child before it died at, until one comes
to its end. After each the ledger is verified. Prints a line of JSON for each: the statement, and
what was found wrong. It imports everything first and forks: a child costs milliseconds.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psycopg
from psycopg import AsyncRawCursor

from ackbone.store.postgres.prune import Pruner
from ackbone.store.postgres.store import PostgresStore
from ackbone.store.postgres.verify import verify_ledger

KEY = b"k" * 32
KEEP_DAYS = 10


async def prune(url: str, known: Collection[str], pipe: int) -> None:
    store = PostgresStore(url, lease_s=1e9)
    await store.open()
    worker = await store.register("victim")
    execute = AsyncRawCursor.execute

    async def watched(self: Any, query: Any, *args: Any, **kw: Any) -> Any:
        if str(query) not in known:
            os.write(pipe, str(query).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return await execute(self, query, *args, **kw)

    AsyncRawCursor.execute = watched  # type: ignore[method-assign]
    gone = await Pruner(store, key=KEY, keep_days=KEEP_DAYS).step(worker)
    AsyncRawCursor.execute = execute  # type: ignore[method-assign]
    assert gone.all
    await store.leave(worker)
    await store.close()


def prune_until(known: Collection[str], url: str) -> str | None:
    """In a child: the statement that it died at. None: it came to its end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            asyncio.run(prune(url, known, write))
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        statement = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return statement
    assert os.WEXITSTATUS(status) == 0
    return None


def young(url: str) -> list[Any]:
    with psycopg.connect(url) as conn:
        return conn.execute(
            "SELECT id FROM event_log WHERE event_type <> 'ledger.pruned'"
            " AND created_at >= clock_timestamp() - %s * interval '1 day' ORDER BY 1",
            (KEEP_DAYS,),
        ).fetchall()


def main(url: str, anchor_file: Path) -> None:
    before = young(url)
    known: list[str] = []
    while (statement := prune_until(known, url)) is not None:
        known.append(statement)
        found = [str(each) for each in verify_ledger(url, KEY, anchor_file).findings]
        if young(url) != before:
            found.append("young events are gone")
        print(json.dumps({"before": statement, "found": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
