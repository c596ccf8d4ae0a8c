"""FastStream on RabbitMQ: a quorum queue, persistent messages, each acknowledged for itself."""

import asyncio
import os
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue
from messages import batches
from ticks import ticks

QUEUE = RabbitQueue("bench", durable=True, queue_type=QueueType.QUORUM)
# Without its log lines and without pydantic: both cost it more than RabbitMQ does.
broker = RabbitBroker(
    os.environ["BENCH_URL"],
    logger=None,
    apply_types=False,
    default_channel=Channel(prefetch_count=500),
)
app = FastStream(broker, logger=None)


@broker.subscriber(QUEUE, ack_policy=AckPolicy.REJECT_ON_ERROR)  # type: ignore[untyped-decorator, unused-ignore]
async def noop(message: dict[str, Any]) -> None:
    ticks.tick()


async def fill() -> None:
    await broker.connect()
    await broker.declare_queue(QUEUE)
    for batch in batches(500):
        await asyncio.gather(*(broker.publish(each, QUEUE, persist=True) for each in batch))
    await broker.stop()


if __name__ == "__main__":
    asyncio.run(fill())
