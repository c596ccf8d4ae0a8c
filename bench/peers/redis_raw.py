"""redis-py and hiredis at their barest: `python redis_raw.py drain|publish MESSAGES` prints a rate.

Drain: XREADGROUP of 500, one XACK for all of them, in the round trip of the next read.
Publish: XADD, 500 in a pipeline.
"""

import json
import os
import sys
import time
from typing import Any

from redis import Redis

STREAM, GROUP, BATCH = "raw", "workers", 500


def publish(client: Any, bodies: list[str]) -> float:
    begin = time.perf_counter()
    for at in range(0, len(bodies), BATCH):
        with client.pipeline(transaction=False) as pipe:
            for body in bodies[at : at + BATCH]:
                pipe.xadd(STREAM, {"body": body})
            pipe.execute()
    return len(bodies) / (time.perf_counter() - begin)


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
    rate = publish(client, bodies)
    if what == "drain":
        rate = drain(client)
    print(json.dumps({"rate": rate}))


if __name__ == "__main__":
    main(*sys.argv[1:])
