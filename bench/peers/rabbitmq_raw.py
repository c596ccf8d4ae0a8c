"""aio-pika at its barest: `python rabbitmq_raw.py WHAT MESSAGES` prints a rate.

drain: a consumer with a prefetch of 500 that acknowledges each message. publish: persistent
messages to a quorum queue, 500 at a time, each confirmed. Nothing is made meanwhile.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import aio_pika

QUEUE, BATCH = "raw", 500


async def publish(channel: Any, bodies: list[bytes]) -> float:
    exchange, persistent = channel.default_exchange, aio_pika.DeliveryMode.PERSISTENT
    begin = time.perf_counter()
    for at in range(0, len(bodies), BATCH):
        await asyncio.gather(
            *(
                exchange.publish(aio_pika.Message(body, delivery_mode=persistent), QUEUE)
                for body in bodies[at : at + BATCH]
            )
        )
    return len(bodies) / (time.perf_counter() - begin)


async def drain(channel: Any, count: int) -> float:
    await channel.set_qos(prefetch_count=BATCH)
    queue = await channel.get_queue(QUEUE)
    times: list[float] = []
    ended = asyncio.Event()

    async def on_message(message: Any) -> None:
        await message.ack()
        times.append(time.perf_counter())
        if len(times) == count:
            ended.set()

    await queue.consume(on_message)
    await ended.wait()
    return (count - 1) / (times[-1] - times[0])


async def main(what: str, bodies: list[bytes]) -> None:
    async with await aio_pika.connect(os.environ["BENCH_URL"]) as connection:
        channel = await connection.channel()
        await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        rate = await publish(channel, bodies)
        if what == "drain":
            rate = await drain(channel, len(bodies))
    print(json.dumps({"rate": rate}))


if __name__ == "__main__":
    with open(sys.argv[2], "rb") as lines:
        asyncio.run(main(sys.argv[1], [line.strip() for line in lines]))
