"""Latency: from the call of `send` in one process to the handler's first line in another, idle."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ackbone import App
from bench import processes, workload
from bench.app import SAMPLE
from bench.figures import Row, at_most, percentile
from bench.measure import Bench

SPACING_S = 0.02
WARM_UP = 20
_LIMIT_S = 60.0


def section(bench: Bench) -> list[Row]:
    """At least 500 messages, each alone in the system."""
    count = bench.size(500, least=20)

    def run() -> dict[str, float]:
        with bench.home() as home:
            return measure(home, count)

    seen = bench.take_turns({f"{count} messages, {SPACING_S * 1e3:.0f} ms apart": run})
    rows = []
    for key, name, goal in (
        ("p50", "send → handler, median", 3.0),
        ("p99", "send → handler, p99", 15.0),
        ("max", "send → handler, worst", None),
        ("send p50", "send alone, median", None),
        ("send p99", "send alone, p99", None),
    ):
        rows.append(
            Row(
                section="latency",
                name=name,
                unit="ms",
                values=seen[key],
                lower_is_better=True,
                goal=None if goal is None else at_most(goal),
            )
        )
    return rows


def measure(home: Path, count: int, broker: str = "sqlite") -> dict[str, float]:
    """Milliseconds: percentiles from send to handler, and of the sends alone."""
    samples = home / "samples"
    env = {
        "ACKBONE_BENCH_SAMPLES": str(samples),
        "ACKBONE__BROKER": broker,
        "ACKBONE__DEFAULT_QUEUE": workload.queue_on(broker),
    }
    with processes.worker(home, until_idle=False, env=env) as child:
        app = workload.open_app(home, broker)
        sends = asyncio.run(_send(app, count, samples, child))
        child.stop()
    waits = [ns / 1e6 for n, ns in _read(samples) if n >= WARM_UP]
    return {
        "p50": percentile(waits, 0.50),
        "p99": percentile(waits, 0.99),
        "max": max(waits),
        "send p50": percentile(sends[WARM_UP:], 0.50),
        "send p99": percentile(sends[WARM_UP:], 0.99),
    }


async def _send(app: App, count: int, samples: Path, child: processes.Measured) -> list[float]:
    """Milliseconds that each send took; returns once every handler ran."""
    async with app:
        took = []
        for n in range(WARM_UP + count):
            due = time.monotonic() + SPACING_S
            took.append(await _send_one(app, n))
            if n < WARM_UP:  # the worker may be starting still
                await _arrived(samples, n + 1, child)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await _arrived(samples, WARM_UP + count, child)
    return took


async def _send_one(app: App, n: int) -> float:
    begin = time.monotonic_ns()
    await app.send("bench.latency", {"n": n, "sent_ns": begin, **workload.payload(n)})
    return (time.monotonic_ns() - begin) / 1e6


async def _arrived(samples: Path, count: int, child: processes.Measured) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while _size(samples) < count * SAMPLE.size:
        child.check()
        if time.monotonic() > deadline:
            raise processes.ProcessFailed(f"message {count} did not arrive\n{child.tail}")
        await asyncio.sleep(0.005)


def _size(samples: Path) -> int:
    try:
        return samples.stat().st_size
    except FileNotFoundError:
        return 0


def _read(samples: Path) -> list[tuple[int, int]]:
    return [(n, ns) for n, ns in SAMPLE.iter_unpack(samples.read_bytes())]
