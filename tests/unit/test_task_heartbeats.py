"""Heartbeats of the task protocol: of tasks alone, and only of those that run for long."""

from types import SimpleNamespace
from typing import Any

import msgspec

from ackbone.core.broker import Subscription
from ackbone.core.store import Worker
from ackbone.core.task_protocol import TaskProtocol
from ackbone.engine.task_heartbeats import TaskHeartbeats
from ackbone.testing import FakeClock


async def test_a_task_that_has_just_begun_has_none():
    clock, told = FakeClock(), list[tuple[Any, Any]]()

    async def heartbeat(run: Any, data: Any) -> None:
        told.append((run, data))

    other = Subscription(name="other", queue="other")
    tasks = msgspec.structs.replace(other, protocol=TaskProtocol())
    now = clock.now_us()
    begun = {"long": (tasks, now - 10_000_000), "no task": (other, now - 10_000_000)}
    begun |= {"short": (tasks, now - 9_000_000), "not begun": (tasks, 0)}
    active = [
        SimpleNamespace(run=name, sub=sub, started_us=at) for name, (sub, at) in begun.items()
    ]
    store: Any = SimpleNamespace(heartbeat=heartbeat)
    executor: Any = SimpleNamespace(active=active)
    await TaskHeartbeats(store, executor, clock, every_s=10).step(Worker(worker_id=1))
    assert told == [("long", {"running_s": 10.0})]
