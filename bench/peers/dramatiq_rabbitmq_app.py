"""Dramatiq on RabbitMQ, each send confirmed; `python dramatiq_rabbitmq_app.py FILE` fills it."""

import os
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from messages import messages
from ticks import ticks

dramatiq.set_broker(RabbitmqBroker(url=os.environ["BENCH_URL"], confirm_delivery=True))


@dramatiq.actor(max_retries=0)  # type: ignore[untyped-decorator, unused-ignore]
def noop(message: dict[str, Any]) -> None:
    ticks.tick()


if __name__ == "__main__":
    # Started as a program this module is `__main__`: the worker knows the actor by its name alone.
    for each in messages():
        noop.send(each)
