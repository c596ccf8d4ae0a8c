"""Dramatiq on Redis: run by its own command; `python dramatiq_app.py MESSAGES` fills the queue."""

import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from messages import messages
from ticks import ticks

dramatiq.set_broker(RedisBroker(url=os.environ["BENCH_URL"]))


@dramatiq.actor(max_retries=0)  # type: ignore[untyped-decorator, unused-ignore]
def noop(message: dict[str, Any]) -> None:
    ticks.tick()


if __name__ == "__main__":
    # Started as a program this module is `__main__`: the worker knows the actor by its name alone.
    for each in messages():
        noop.send(each)
