"""FastStream on Redis Streams, a group that acknowledges; each message handled for itself."""

import asyncio
import os
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.redis import RedisBroker, StreamSub
from messages import batches
from redis.asyncio import Redis
from ticks import ticks

STREAM, GROUP = "bench", "workers"
URL = os.environ["BENCH_URL"]
# Without its log lines and without pydantic: both cost it more than Redis does.
broker = RedisBroker(URL, logger=None, apply_types=False)
app = FastStream(broker, logger=None)


@broker.subscriber(  # type: ignore[untyped-decorator, unused-ignore]
    stream=StreamSub(STREAM, group=GROUP, consumer="one", max_records=500),
    ack_policy=AckPolicy.REJECT_ON_ERROR,
)
async def noop(message: dict[str, Any]) -> None:
    ticks.tick()


async def fill() -> None:
    client = Redis.from_url(URL)
    await client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    await broker.connect()
    for batch in batches(500):
        async with client.pipeline(transaction=False) as pipe:
            for message in batch:
                await broker.publish(message, stream=STREAM, pipeline=pipe)
            await pipe.execute()
    await broker.stop()
    await client.aclose()


if __name__ == "__main__":
    asyncio.run(fill())
