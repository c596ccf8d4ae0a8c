"""Huey on SQLite: the app that its own consumer runs.

The task counts itself in a small mapped file: number, first and last time (CLOCK_MONOTONIC).
"""

import mmap
import os
import struct
import threading
import time
from typing import Any

from huey import SqliteHuey

TICKS = struct.Struct("<qdd")
# Huey's words for PRAGMA synchronous: True is FULL, False is OFF.
FSYNC = os.environ["BENCH_FSYNC"] == "full"

RESULTS = os.environ["BENCH_RESULTS"] == "kept"

huey = SqliteHuey("bench", filename=os.environ["BENCH_DB"], results=RESULTS, fsync=FSYNC)


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


@huey.task()  # type: ignore[untyped-decorator, unused-ignore]
def noop(message: dict[str, Any]) -> dict[str, str] | None:
    """Nothing but the count, and a result where it is kept."""
    ticks.tick()
    return {"order": message["order"]} if RESULTS else None
