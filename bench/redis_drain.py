"""Tasks on a stream, drained by workers of ours; times and counts by what Redis itself says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import processes, workload
from .redis_server import RedisServer
from .sections.drain import read_back

TASKS, RESULTS, GROUP = "stream:task", "stream:result", "cg:workers"
CHUNK = 500
LIMIT_S = 60.0
MANY_SLOTS = 4000
"""For throughput. A batch is at most a thousand: one is run and one is read while two others are
claimed."""


@dataclass(frozen=True)
class Stage:
    """A server, a folder for what a worker keeps, and the worker's settings."""

    home: Path
    server: RedisServer
    store: str = "sqlite"
    """URL of the store, as `store` in ackbone.yaml."""
    slots: int | None = None
    others_cpu_s: Callable[[], float] = lambda: 0.0
    """CPU time that the store's server has used so far, where it has one."""

    @property
    def env(self) -> dict[str, str]:
        found = {
            "ACKBONE__BROKER": self.server.url,
            "ACKBONE__STORE": self.store,
            "ACKBONE__DEFAULT_QUEUE": workload.queue_on(self.server.url),
        }
        if self.slots is not None:
            found["ACKBONE__WORKER__SLOTS"] = str(self.slots)
        return found

    def servers_cpu_s(self) -> float:
        return self.server.cpu_s() + self.others_cpu_s()

    def change_store(self) -> None:
        """The group is another store's from now on; its workers are gone."""
        self.server.client.delete(f"{{{TASKS}}}:store:{GROUP}")

    def fill(self, count: int, *, first: int = 0) -> None:
        """So many tasks, each with a key of its own."""
        asyncio.run(self._fill(range(first, first + count)))

    async def _fill(self, numbers: range) -> None:
        async with workload.open_app(self.home, self.server.url) as app:
            await workload.publish(app, TASKS, numbers, CHUNK, keyed=True)


@dataclass(frozen=True)
class Drained:
    """What one drain showed."""

    count: int
    rate: float
    """Results a second, from the first batch of them to the last one."""
    workers_cpu_s: float = 0.0
    servers_cpu_s: float = 0.0


def drain(stage: Stage, count: int, *, workers: int = 1) -> Drained:
    """Let workers empty the stream; raises if a task lacks its one result, or is still pending."""
    before = stage.servers_cpu_s()
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(processes.worker(stage.home, env=stage.env)) for _ in range(workers)
        ]
        for child in running:
            child.wait()
        used = sum(child.cpu_s for child in running)
        told = _told(stage.server)
        if told != (count, count):
            raise processes.ProcessFailed(
                f"{count} tasks have {told[0]} results, for {told[1]} of them\n{running[0].tail}"
            )
    left = stage.server.client.xlen(TASKS), stage.server.client.xpending(TASKS, GROUP)["pending"]
    if left != (0, 0):
        raise processes.ProcessFailed(f"{left[0]} entries are left, {left[1]} pending")
    if stage.store == "sqlite":
        read_back(stage.home)  # every task has its one final event
    return Drained(count, rate(stage.server), used, stage.servers_cpu_s() - before)


def drain_for(stage: Stage, seconds: float, *, first: int) -> tuple[float, float]:
    """One worker for a while: the rate of so many first results, and the most memory that it held
    (MB)."""
    stage.server.client.delete(RESULTS)
    with processes.worker(stage.home, until_idle=False, env=stage.env) as child:
        deadline = time.monotonic() + LIMIT_S
        while not stage.server.client.xlen(RESULTS):
            child.check()
            if time.monotonic() > deadline:
                raise processes.ProcessFailed(f"no result in {LIMIT_S:.0f} s\n{child.tail}")
            time.sleep(0.01)
        time.sleep(seconds)
        child.check()
        peak = child.peak_mb()
        child.stop()
    return rate(stage.server, first=first), peak


def rate(server: RedisServer, *, first: int | None = None) -> float:
    """Results a second: entry ids are the server's own milliseconds. `first`: of so many only.

    The first batch sets the clock and is not counted: what came before it is start-up.
    """
    found = server.client.xrange(RESULTS, count=first)
    if not found:
        raise processes.ProcessFailed("no results: nothing was drained")
    moments = [int(entry.partition(b"-")[0]) for entry, _ in found]
    counted = len(moments) - moments.count(moments[0])
    return counted / max(1, moments[-1] - moments[0]) * 1000


def _told(server: RedisServer) -> tuple[int, int]:
    """Results, and tasks that have one that says `succeeded`."""
    entries = server.client.xrange(RESULTS)
    done = {fields[b"task_id"] for _, fields in entries if fields[b"status"] == b"succeeded"}
    return len(entries), len(done)
