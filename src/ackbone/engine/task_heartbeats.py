"""Heartbeats of the task protocol: `task.heartbeat` for tasks that run for long."""

from __future__ import annotations

import asyncio
import logging

from ackbone.core.clock import Clock
from ackbone.core.errors import LeaseLost
from ackbone.core.store import RunWrites, Worker

from .executor import Executor

log = logging.getLogger("ackbone.engine")


class TaskHeartbeats:
    """Writes a heartbeat for each task that has run for a whole interval."""

    def __init__(
        self, store: RunWrites, executor: Executor, clock: Clock, *, every_s: float
    ) -> None:
        self._store = store
        self._executor = executor
        self._clock = clock
        self._every_us = int(every_s * 1e6)

    async def step(self, worker: Worker) -> None:
        now_us = self._clock.now_us()
        begun = now_us - self._every_us
        long = [
            active
            for active in self._executor.active
            if active.sub.protocol is not None and 0 < active.started_us <= begun
        ]
        beats = [
            self._store.heartbeat(
                active.run, {"running_s": round((now_us - active.started_us) / 1e6, 1)}
            )
            for active in long
        ]
        answers = await asyncio.gather(*beats, return_exceptions=True)
        for active, answer in zip(long, answers, strict=True):
            # After LeaseLost the run has just ended, or learns by itself that it lost its claim.
            if isinstance(answer, Exception) and not isinstance(answer, LeaseLost):
                log.warning("message %s: no heartbeat: %s", active.run.message.id, answer)
