"""One timer heap for all timeouts: a timer per run costs more than the run."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class Deadline:
    """An entry; cancel it when the run is over."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Deadlines:
    """Calls back when a moment (loop time) has come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._count = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, at: float, call: Callable[[], None]) -> Deadline:
        entry = Deadline(call)
        heapq.heappush(self._heap, (at, next(self._count), entry))
        if self._timer is None or at < self._timer.when():
            self._arm()
        return entry

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
        if self._heap:
            self._timer = asyncio.get_running_loop().call_at(self._heap[0][0], self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)[2]
            if entry.call is not None:
                entry.call()
        self._arm()
