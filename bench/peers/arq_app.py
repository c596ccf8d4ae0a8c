"""arq on Redis: run by its own command; as a program it fills the queue."""

import asyncio
import os
from typing import Any

from arq.connections import RedisSettings, create_pool
from messages import batches
from ticks import ticks
from uvloop import EventLoopPolicy

asyncio.set_event_loop_policy(EventLoopPolicy())
SERVER = RedisSettings.from_dsn(os.environ["BENCH_URL"])
QUIET = {"version": 1, "disable_existing_loggers": False, "loggers": {"arq": {"level": "WARNING"}}}


async def noop(ctx: dict[str, Any], message: dict[str, Any]) -> None:
    ticks.tick()


class WorkerSettings:
    """What its command reads."""

    functions = (noop,)
    redis_settings = SERVER
    max_jobs = 100
    keep_result = 0
    poll_delay = 0.01
    max_tries = 1


async def fill() -> None:
    pool = await create_pool(SERVER)
    for batch in batches(50):
        await asyncio.gather(*(pool.enqueue_job("noop", message) for message in batch))
    await pool.aclose()


if __name__ == "__main__":
    asyncio.run(fill())
