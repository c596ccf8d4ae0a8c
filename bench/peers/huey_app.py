"""Huey on SQLite: the app that its own consumer runs."""

import os
from typing import Any

from huey import SqliteHuey
from ticks import ticks

# Huey's words for PRAGMA synchronous: True is FULL, False is OFF.
FSYNC = os.environ["BENCH_FSYNC"] == "full"

RESULTS = os.environ["BENCH_RESULTS"] == "kept"

huey = SqliteHuey("bench", filename=os.environ["BENCH_DB"], results=RESULTS, fsync=FSYNC)


@huey.task()  # type: ignore[untyped-decorator, unused-ignore]
def noop(message: dict[str, Any]) -> dict[str, str] | None:
    """Nothing but the count, and a result where it is kept."""
    ticks.tick()
    return {"order": message["order"]} if RESULTS else None
