"""Procrastinate on PostgreSQL: `fill MESSAGES` fills the queue, `work` empties it.

Its fastest settings, as tried on two cores: 5 jobs at a time, a connection for each, finished jobs
kept (to delete them costs more), no listening and no waiting, orjson and uvloop.
"""

import asyncio
import os
import sys
from typing import Any

import orjson
from messages import batches
from procrastinate import App, PsycopgConnector
from ticks import ticks
from uvloop import EventLoopPolicy

asyncio.set_event_loop_policy(EventLoopPolicy())
CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "5"))
app = App(
    connector=PsycopgConnector(
        conninfo=os.environ["BENCH_URL"],
        min_size=CONCURRENCY,
        max_size=CONCURRENCY,
        json_dumps=lambda value: orjson.dumps(value).decode(),
        json_loads=orjson.loads,
    )
)


@app.task(name="noop")  # type: ignore[untyped-decorator, unused-ignore]
async def noop(message: dict[str, Any]) -> None:
    ticks.tick()


async def fill() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for batch in batches(500):
            await noop.batch_defer_async(*({"message": message} for message in batch))


async def work() -> None:
    async with app.open_async():
        await app.run_worker_async(
            concurrency=CONCURRENCY, wait=False, listen_notify=False, delete_jobs="never"
        )


if __name__ == "__main__":
    asyncio.run(work() if sys.argv[1] == "work" else fill())
