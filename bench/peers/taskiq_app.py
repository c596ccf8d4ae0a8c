"""Taskiq on Redis Streams: run by its own command; as a program it fills the queue."""

import asyncio
import os
from typing import Any

from messages import batches
from taskiq_redis import RedisStreamBroker
from ticks import ticks

broker = RedisStreamBroker(
    os.environ["BENCH_URL"], queue_name="bench", xread_count=500, consumer_id="0"
)


@broker.task(task_name="noop")  # type: ignore[untyped-decorator, unused-ignore]
async def noop(message: dict[str, Any]) -> None:
    ticks.tick()


async def fill() -> None:
    await broker.startup()
    for batch in batches(50):
        await asyncio.gather(*(noop.kiq(message) for message in batch))
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(fill())
