"""A process that sends and drains at once: `python -m bench.both_ways HOME COUNT REPORT`.

It says that it is ready by making the file HOME/ready-PID, begins when HOME/go appears, and ends
when its own messages are sent and nothing is left to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from ackbone import App, Config, Context

from . import workload
from .sections.sends import TASKS


async def run(home: Path, count: int, report: Path) -> None:
    app = App(Config(home=home), name="bench-both-ways")

    @app.on(workload.NOOP)
    async def noop(ctx: Context) -> None:
        """Nothing."""

    async with app:
        worker = app.worker()
        await worker.begin()
        (home / f"ready-{os.getpid()}").touch()
        await asyncio.to_thread(_wait_for, home / "go")
        begun_us = time.time_ns() // 1000
        waits = [
            wait
            for each in await asyncio.gather(
                *(_send(app, range(n, count, TASKS)) for n in range(TASKS))
            )
            for wait in each
        ]
        await app.idle(worker)
        drained = await worker.drain()
    found = {"begun_us": begun_us, "waits_ms": waits, "finished": drained.finished}
    await asyncio.to_thread(report.write_text, json.dumps(found))


def _wait_for(sign: Path) -> None:
    while not sign.exists():
        time.sleep(0.001)


async def _send(app: App, numbers: range) -> list[float]:
    waits = []
    for n in numbers:
        begin = time.perf_counter()
        await app.send(workload.NOOP, workload.payload(n))
        waits.append((time.perf_counter() - begin) * 1e3)
    return waits


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
