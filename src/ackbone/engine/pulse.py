"""The pulse of long tasks: the ledger hears that they are alive, as the task protocol asks for."""

from __future__ import annotations

import asyncio
import logging

from ackbone.core.clock import Clock
from ackbone.core.codec import TASK
from ackbone.core.errors import LeaseLost
from ackbone.core.store import RunWrites, Worker

from .executor import Executor

log = logging.getLogger("ackbone.engine")


class Pulse:
    """Writes a `task.heartbeat` for every task that has run for an interval or more."""

    def __init__(self, executor: Executor, store: RunWrites, clock: Clock, *, every_s: float):
        self._executor = executor
        self._store = store
        self._clock = clock
        self._every_s = every_s

    async def step(self, worker: Worker) -> None:
        now_us = self._clock.now_us()
        begun = now_us - int(self._every_s * 1e6)
        long = [
            active
            for active in self._executor.active
            if active.sub.codec == TASK.name and 0 < active.started_us <= begun
        ]
        beats = [
            self._store.heartbeat(
                active.run, {"running_s": round((now_us - active.started_us) / 1e6, 1)}
            )
            for active in long
        ]
        answers = await asyncio.gather(*beats, return_exceptions=True)
        for active, answer in zip(long, answers, strict=True):
            # It ended just now, or was taken away, and hears of that by itself.
            if isinstance(answer, Exception) and not isinstance(answer, LeaseLost):
                log.warning("message %s: no heartbeat: %s", active.run.message.id, answer)
