"""redis-py and hiredis at their barest: `python redis_raw.py WHAT MESSAGES` prints a rate.

drain: XREADGROUP of 500, one XACK for all of them, in the round trip of the next read.
publish: XADD of one field, 500 in a pipeline. tasks: the same with the fields of a task, as the
task protocol asks for them. Nothing is made meanwhile: texts, ids and times are ready.
"""

import json
import os
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from redis import Redis

STREAM, GROUP, BATCH = "raw", "workers", 500


def publish(client: Any, entries: list[dict[str, str]]) -> float:
    begin = time.perf_counter()
    for at in range(0, len(entries), BATCH):
        with client.pipeline(transaction=False) as pipe:
            for entry in entries[at : at + BATCH]:
                pipe.xadd(STREAM, entry)
            pipe.execute()
    return len(entries) / (time.perf_counter() - begin)


def task(body: str) -> dict[str, str]:
    """An entry of the task protocol."""
    return {
        "task_id": str(uuid.uuid4()),
        "tool_name": "bench.noop",
        "payload": body,
        "idempotency_key": str(uuid.uuid4()),
        "retry_count": "0",
        "created_at": datetime.now(UTC).isoformat(),
    }


def drain(client: Any) -> float:
    client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    done = 0
    ids: list[bytes] = []
    begin = time.perf_counter()
    while True:
        with client.pipeline(transaction=False) as pipe:
            if ids:
                pipe.xack(STREAM, GROUP, *ids)
            pipe.xreadgroup(GROUP, "one", {STREAM: ">"}, count=BATCH)
            answer = pipe.execute()[-1]
        entries = answer[0][1] if answer else []
        if not entries:
            return done / (time.perf_counter() - begin)
        ids = [entry for entry, _ in entries]
        done += len(ids)


def main(what: str, path: str) -> None:
    with open(path, encoding="utf-8") as lines:
        bodies = [line.strip() for line in lines]
    client = Redis.from_url(os.environ["BENCH_URL"], protocol=2)
    rate = publish(client, [task(b) if what == "tasks" else {"body": b} for b in bodies])
    if what == "drain":
        rate = drain(client)
    print(json.dumps({"rate": rate}))


if __name__ == "__main__":
    main(*sys.argv[1:])
