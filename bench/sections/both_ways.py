"""Both ways: processes that send and drain on one file at the same time; nobody may starve."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench import processes
from bench.figures import Row, at_least, at_most, percentile
from bench.measure import Bench

from .drain import read_back
from .sends import TASKS

_LIMIT_S = 60.0


def section(bench: Bench) -> list[Row]:
    """The same number of messages through one process, and through two."""
    count = bench.size(10_000, least=TASKS * 2)

    def through(parties: int, key: str) -> dict[str, float]:
        with bench.home() as home:
            reports = _run(home, parties, count // parties)
            ended_us = read_back(home).ended_us
        total = count // parties * parties
        span = (ended_us - min(r["begun_us"] for r in reports)) / 1e6
        finished = [r["finished"] for r in reports]
        waits = [wait for r in reports for wait in r["waits_ms"]]
        return {
            key: total / span,
            f"{key} p99": percentile(waits, 0.99),
            f"{key} share": min(finished) / max(1, sum(finished)) * 100,
        }

    seen = bench.take_turns(
        {"1 process": lambda: through(1, "one"), "2 processes": lambda: through(2, "two")}
    )
    one = _row("sent and drained, 1 process", "msg/s", seen["one"])
    two = _row("sent and drained, 2 processes", "msg/s", seen["two"], beside=one)
    wait = _row("wait of a send, p99, 1 process", "ms", seen["one p99"])
    waits = _row("wait of a send, p99, 2 processes", "ms", seen["two p99"], beside=wait)
    return [one, two, wait, waits, _row("drained by the lesser of 2", "%", seen["two share"])]


def _run(home: Path, parties: int, each: int) -> list[dict[str, Any]]:
    reports = [home / f"report-{n}" for n in range(parties)]
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                processes.Measured(
                    [sys.executable, "-m", "bench.both_ways", str(home), str(each), str(report)],
                    log=home / f"party-{n}.log",
                    cwd=processes.ROOT,
                )
            )
            for n, report in enumerate(reports)
        ]
        deadline = time.monotonic() + _LIMIT_S
        while len(list(home.glob("ready-*"))) < parties:
            for child in children:
                child.check()
            if time.monotonic() > deadline:
                raise processes.ProcessFailed(f"not ready\n{children[0].tail}")
            time.sleep(0.01)
        (home / "go").touch()
        for child in children:
            child.wait()
    return [json.loads(report.read_text()) for report in reports]


def _row(name: str, unit: str, values: tuple[float, ...], *, beside: Row | None = None) -> Row:
    return Row(
        section="both-ways",
        name=name,
        unit=unit,
        values=values,
        lower_is_better=unit == "ms",
        beside=beside,
        goal=_GOALS.get(name),
    )


_GOALS = {
    "sent and drained, 2 processes": at_least(1),
    "wait of a send, p99, 2 processes": at_most(50),
}
