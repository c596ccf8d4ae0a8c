"""Backlog: a million waiting messages must not slow the drain, nor fill the worker's memory."""

from __future__ import annotations

import time
from pathlib import Path

from bench import processes, workload
from bench.figures import Row, at_least, at_most
from bench.measure import Bench

from .drain import Drained, drain, read_back

FEW, MANY = 10_000, 1_000_000
TIMES = 4
"""So often in a round: ten thousand are over in less than a second, and seconds differ."""
RESERVE = 600_000
"""What all turns take off the long queue at most. It is there from the beginning: to fill it up in
between leaves a log behind that the next worker has to write back."""
_SECONDS, _LONG_S = 2.0, 10.0
"""How long a worker drains the long queue: enough for the ten thousand, and once for its memory."""


def section(bench: Bench) -> list[Row]:
    """The same worker on a short and on a long queue, in turns: ten thousand messages of each."""
    few, many = bench.size(FEW, least=200), bench.size(MANY, least=1000)

    def short() -> dict[str, float]:
        with bench.home() as home:
            workload.fill(home, few)
            return {"short": drain(home, few).rate}

    with bench.home() as long_home:
        bench.say(f"filling a queue with {many:,} messages, and those that will be drained")
        workload.fill(long_home, many + bench.size(RESERVE))
        begun_us = 0

        def long() -> dict[str, float]:
            nonlocal begun_us
            seconds = bench.seconds(_SECONDS if begun_us else _LONG_S)
            drained, peak = _drain_for(long_home, seconds, begun_us, first=few)
            begun_us = time.time_ns() // 1000
            return {"long": drained.rate, "memory": peak}

        turns = {f"{few:,} waiting": short, f"{many:,} waiting": long}
        seen = bench.take_turns(turns, times=TIMES)
    base = Row(
        section="backlog", name=f"drain, {few:,} waiting", unit="msg/s", values=seen["short"]
    )
    return [
        base,
        Row(
            section="backlog",
            name=f"drain, {many:,} waiting",
            unit="msg/s",
            values=seen["long"],
            note="turn by turn",
            paired=True,
            beside=base,
            goal=at_least(0.9),
        ),
        Row(
            section="backlog",
            name="the worker's memory, peak",
            unit="MB",
            values=seen["memory"],
            lower_is_better=True,
            goal=at_most(150),
        ),
    ]


def _drain_for(home: Path, seconds: float, after_us: int, *, first: int) -> tuple[Drained, float]:
    """Let one worker drain for a while; the rate of so many, and the most memory it held."""
    with processes.worker(home, until_idle=False) as child:
        deadline = time.monotonic() + seconds
        peak = 0.0
        while time.monotonic() < deadline:
            child.check()
            peak = max(peak, child.peak_mb())
            time.sleep(0.05)
        child.stop()
    return read_back(home, after_us=after_us, first=first), peak
