"""RQ on Redis, without a fork for each job: run by its own command; as a program it fills."""

import os
from typing import Any

from messages import batches
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer


def noop(message: dict[str, Any]) -> None:
    from ticks import ticks  # the worker imports this module by name, the filling program does not

    ticks.tick()


if __name__ == "__main__":
    queue = Queue(
        "bench", connection=Redis.from_url(os.environ["BENCH_URL"]), serializer=JSONSerializer
    )
    for batch in batches(500):
        queue.enqueue_many(
            [Queue.prepare_data("rq_app.noop", (message,), result_ttl=0) for message in batch]
        )
