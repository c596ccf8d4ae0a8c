"""Drain: a filled queue, a handler that does nothing, every guarantee on."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import plain, processes, workload
from bench.figures import Row, at_least, ratio_at_most
from bench.measure import Bench

_COUNTS = (
    # A message that an earlier worker claimed and handed back keeps the time of its first claim.
    "SELECT count(*), min(started_at) FILTER (WHERE started_at > ?1), max(completed_at)"
    " FROM queue_executions WHERE status = 'succeeded' AND completed_at > ?1"
)
_EARLIEST = (
    "SELECT completed_at FROM queue_executions WHERE status = 'succeeded' AND completed_at > ?1"
    " ORDER BY completed_at LIMIT 1 OFFSET ?2"
)
_FINALS = (
    "SELECT count(*), count(DISTINCT task_id) FROM event_log"
    " WHERE event_type = 'task.succeeded' AND created_at > ?"
)


@dataclass(frozen=True)
class Drained:
    """What one drain showed, by the database's own times."""

    count: int
    seconds: float
    """From the first claim to the last finish."""
    ended_us: int
    cpu_s: float = 0.0
    timed: int | None = None
    """So many were done in these seconds; None: all."""

    @property
    def rate(self) -> float:
        return (self.timed or self.count) / self.seconds


MANY_SLOTS = 1000
"""For throughput: what is claimed and finished in one go is as many messages as there are slots."""


def drain(
    home: Path, count: int, *, workers: int = 1, slots: int | None = None, broker: str = "sqlite"
) -> Drained:
    """Let workers empty the queue; raises if a message lacks its one final event."""
    env = {"ACKBONE__BROKER": broker}
    if slots is not None:
        env["ACKBONE__WORKER__SLOTS"] = str(slots)
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(processes.worker(home, env=env)) for _ in range(workers)]
        for child in running:
            child.wait()
        drained = read_back(home)
        if drained.count != count:
            raise processes.ProcessFailed(
                f"{drained.count} of {count} messages succeeded\n{running[0].tail}"
            )
        used = sum(child.cpu_s for child in running)
    return Drained(drained.count, drained.seconds, drained.ended_us, used)


def read_back(home: Path, *, after_us: int = 0, first: int | None = None) -> Drained:
    """Count and time what was finished (since then), and hold the ledger against it.

    `first`: the time is that of so many of them, the earliest.
    """
    with contextlib.closing(sqlite3.connect(workload.database(home))) as conn:
        count, begun, last = conn.execute(_COUNTS, (after_us,)).fetchone()
        finals, distinct = conn.execute(_FINALS, (after_us,)).fetchone()
        timed = count if first is None else min(count, first)
        if timed < count:
            (last,) = conn.execute(_EARLIEST, (after_us, timed - 1)).fetchone()
    if not count:
        raise processes.ProcessFailed(f"nothing was drained from {home}")
    if (finals, distinct) != (count, count):
        raise processes.ProcessFailed(
            f"{count} messages succeeded, with {finals} final events for {distinct} of them"
        )
    return Drained(count, max(1, last - begun) / 1e6, last, timed=timed)


def section(bench: Bench) -> list[Row]:
    """One and two processes, with and without keys, beside a plain loop and plain batches."""
    count, few = bench.size(20_000, least=200), bench.size(2_000, least=50)
    idle: list[float] = []

    def ours(
        name: str, *, workers: int, keyed: bool = False, slots: int | None = None
    ) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            with bench.home() as home:
                workload.fill(home, count, keyed=keyed)
                drained = drain(home, count, workers=workers, slots=slots)
            used = max(0.0, drained.cpu_s - workers * min(idle)) / count * 1e6
            return {name: drained.rate, f"{name} cpu": used}

        return run

    def loop(name: str, *, keyed: bool = False, batch: int = 0) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            with bench.home() as home:
                workload.fill(home, count if batch else few, keyed=keyed)
                done, seconds = (
                    plain.drain_by_batches(home, batch) if batch else plain.drain_by_steps(home)
                )
            return {name: done / seconds}

        return run

    def start_and_stop() -> dict[str, float]:
        """What a worker's start and stop cost alone, to take off."""
        with bench.home() as home:
            workload.fill(home, 0)
            with processes.worker(home) as child:
                child.wait()
                idle.append(child.cpu_s)
        return {"idle": idle[-1]}

    seen = bench.take_turns(
        {
            "a worker's start and stop": start_and_stop,
            "plain loop": loop("steps"),
            "plain loop, key": loop("steps key", keyed=True),
            "plain batches": loop("batches", batch=100),
            "1 process": ours("one", workers=1),
            "1 process, key": ours("one key", workers=1, keyed=True),
            "1 process, many slots": ours("many", workers=1, slots=MANY_SLOTS),
            "2 processes": ours("two", workers=2),
        }
    )
    return _rows(seen)


def _rows(seen: dict[str, tuple[float, ...]]) -> list[Row]:
    def rate(key: str, name: str) -> Row:
        return Row(section="drain", name=name, unit="msg/s", values=seen[key])

    steps = rate("steps", "plain sqlite3, a commit per step")
    steps_key = rate("steps key", "plain sqlite3, a commit per step, key")
    batches = rate("batches", "plain sqlite3, batches of 100")
    one = _beside(rate("one", "ackbone, 1 process"), steps, goal=10)
    one_key = _beside(rate("one key", "ackbone, 1 process, key"), steps_key, goal=10)
    many = Row(
        section="drain",
        name=f"ackbone, 1 process, {MANY_SLOTS} slots",
        unit="msg/s",
        values=seen["many"],
        beside=steps,
    )
    two = _beside(rate("two", "ackbone, 2 processes"), one, goal=1)
    cpu_one = Row(
        section="drain",
        name="CPU a message, 1 process",
        unit="µs",
        values=seen["one cpu"],
        lower_is_better=True,
    )
    cpu_two = Row(
        section="drain",
        name="CPU a message, 2 processes",
        unit="µs",
        values=seen["two cpu"],
        lower_is_better=True,
        beside=cpu_one,
        goal=ratio_at_most(1.25),
    )
    beside_batches = Row(
        section="drain",
        name="ackbone, 1 process, beside batches",
        unit="msg/s",
        values=one.values,
        beside=batches,
    )
    return [steps, steps_key, batches, one, one_key, many, beside_batches, two, cpu_one, cpu_two]


def _beside(row: Row, other: Row, *, goal: float) -> Row:
    return Row(
        section=row.section,
        name=row.name,
        unit=row.unit,
        values=row.values,
        beside=other,
        goal=at_least(goal),
    )
