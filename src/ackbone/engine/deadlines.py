"""One timer heap for all timeouts, because a timer per run costs more than the run."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

_FEW = 64
"""Cancelled deadlines that may stay in the heap before it is cleaned."""


class Deadline:
    """One deadline. Cancel it when the run is over."""

    __slots__ = ("_home", "call")

    def __init__(self, call: Callable[[], None], home: Deadlines) -> None:
        self.call: Callable[[], None] | None = call
        self._home = home

    def cancel(self) -> None:
        if self.call is not None:
            self.call = None
            self._home._cancel_one()


class Deadlines:
    """Calls back at given times of the event loop's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._count = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._cancelled = 0

    def __len__(self) -> int:
        """Return the number of entries, with cancelled ones."""
        return len(self._heap)

    def add(self, at: float, call: Callable[[], None]) -> Deadline:
        entry = Deadline(call, self)
        heapq.heappush(self._heap, (at, next(self._count), entry))
        if self._timer is None or at < self._timer.when():
            self._arm()
        return entry

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()

    def _cancel_one(self) -> None:
        """Clean the heap now and then. Runs are far shorter than their timeouts, and the heap would
        grow with each of them."""
        self._cancelled += 1
        if self._cancelled > _FEW and self._cancelled > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].call is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

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
        try:
            while self._heap and self._heap[0][0] <= now:
                entry = heapq.heappop(self._heap)[2]
                call, entry.call = entry.call, None
                if call is not None:
                    call()
        finally:  # the loop reports the error of one call; the other deadlines stay armed
            self._arm()
