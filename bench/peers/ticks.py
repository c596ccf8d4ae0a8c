"""How often a task ran, counted in a small mapped file: number, first and last time.

Times are CLOCK_MONOTONIC, one clock for all processes. `BENCH_TICKS` names the file.
"""

import mmap
import os
import struct
import threading
import time

TICKS = struct.Struct("<qdd")


class Ticks:
    """The count of this process."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._map = mmap.mmap(os.open(path, os.O_RDWR), TICKS.size)
        self._count = 0
        self._first = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._first = self._first or now
            self._count += 1
            TICKS.pack_into(self._map, 0, self._count, self._first, now)


ticks = Ticks(os.environ["BENCH_TICKS"])
