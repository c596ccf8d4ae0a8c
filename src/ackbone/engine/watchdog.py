"""Names the handler that blocks the event loop.

An async handler that computes or waits without `await` stops every other message of its worker.
A thread checks a few times a second whether the loop moves. If it does not, the thread reads which
task the loop is running: the task of a run names its handler. The loop itself only counts.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ackbone.core.clock import Clock

from .executor import Active
from .tracebacks import user_line

log = logging.getLogger("ackbone.engine")

LOOK_S = 0.25
LIMIT_S = 1.0
"""A handler that holds the loop for longer than this is named."""
STOOD_STILL_S = 1.0
"""If this thread itself is late by this much, the whole process stood still, not one handler."""
ENDLESS_S = 5.0
"""After this time the handler is named, although it still blocks the loop."""


class _Block:
    """A task that has not returned to the loop."""

    def __init__(self, ticks: int, task: asyncio.Task[Any], since: float) -> None:
        self.ticks = ticks
        self.task = task
        self.since = self.seen = since
        self.name = ""
        self.place = ""
        self.told = False

    @property
    def seconds(self) -> float:
        """How long it has lasted. It began and ended somewhere between two looks."""
        return self.seen - self.since + LOOK_S


class Watchdog:
    """Watches the event loop in which it was made, until it is closed."""

    def __init__(
        self, active: Callable[[], Iterable[Active]], clock: Clock, *, limit_s: float = LIMIT_S
    ) -> None:
        self._active = active
        self._clock = clock
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._ticks = 0
        self._tick()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ackbone-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and log a block that has just ended. Called on the loop: the thread needs
        a moment only."""
        self._stop.set()
        self._ticker.cancel()
        self._thread.join(LOOK_S)

    def _tick(self) -> None:
        self._ticks += 1
        self._ticker = self._loop.call_later(LOOK_S, self._tick)

    def _run(self) -> None:
        block: _Block | None = None
        looked = self._clock.monotonic()
        while not self._stop.wait(LOOK_S):
            now, before = self._clock.monotonic(), looked
            looked = now
            task, ticks = self._current(), self._ticks
            same = block is not None and block.ticks == ticks and block.task is task
            if block is not None and not same:
                self._tell(block)
            if now - before > STOOD_STILL_S:  # the process was suspended
                block = None
            elif block is None or not same:
                block = None if task is None else _Block(ticks, task, now)
            else:
                self._look_at(block, now)
        if block is not None:  # it is over: the loop has called `close`
            self._tell(block)

    def _current(self) -> asyncio.Task[Any] | None:
        """Return the task that the loop is running. None: the loop waits."""
        try:
            return asyncio.current_task(self._loop)
        except RuntimeError:
            return None

    def _look_at(self, block: _Block, now: float) -> None:
        block.seen = now
        if not block.name and block.seconds > self._limit_s / 2:  # read it while it lasts
            block.name = self._name_of(block.task)
            block.place = user_line(sys._current_frames().get(self._loop_thread))
        if block.seconds > ENDLESS_S:
            self._tell(block)

    def _tell(self, block: _Block) -> None:
        if block.told or block.seconds <= self._limit_s:
            return
        block.told = True
        log.warning(
            "%s blocked the event loop for %.1f s%s: no other message of this worker went on "
            "meanwhile. Use await, or make it a plain function, which runs in a thread",
            block.name,
            block.seconds,
            f" ({block.place})" if block.place else "",
        )

    def _name_of(self, task: asyncio.Task[Any]) -> str:
        for active in list(self._active()):
            if active.task is task and active.handler is not None:
                return f"handler {active.handler.name} (message {active.run.message.id})"
        return f"task {task.get_name()}"
