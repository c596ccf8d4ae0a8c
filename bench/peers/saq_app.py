"""SAQ on Redis: run by its own command; as a program it fills the queue."""

import asyncio
import os
from typing import Any

import orjson
from messages import batches
from saq import Queue
from ticks import ticks
from uvloop import EventLoopPolicy

asyncio.set_event_loop_policy(EventLoopPolicy())
KEEP_NOTHING = -1
queue = Queue.from_url(os.environ["BENCH_URL"], dump=orjson.dumps, load=orjson.loads)


async def noop(ctx: dict[str, Any], *, message: dict[str, Any]) -> None:
    ticks.tick()


settings = {"queue": queue, "functions": [noop], "concurrency": 100}


async def fill() -> None:
    await queue.connect()
    for batch in batches(50):
        await asyncio.gather(*(queue.enqueue("noop", message=m, ttl=KEEP_NOTHING) for m in batch))
    await queue.disconnect()


if __name__ == "__main__":
    asyncio.run(fill())
