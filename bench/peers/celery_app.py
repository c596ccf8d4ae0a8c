"""Celery on Redis: run by its own command; as a program it fills the queue."""

import os
from typing import Any

from celery import Celery
from messages import messages
from ticks import ticks

app = Celery("celery_app", broker=os.environ["BENCH_URL"])
app.conf.update(
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=500,
    worker_enable_remote_control=False,
    worker_disable_rate_limits=True,
    worker_hijack_root_logger=False,
)


@app.task(name="noop")  # type: ignore[untyped-decorator, unused-ignore]
def noop(message: dict[str, Any]) -> None:
    ticks.tick()


if __name__ == "__main__":
    with app.producer_pool.acquire(block=True) as producer:
        for each in messages():
            noop.apply_async((each,), producer=producer)
