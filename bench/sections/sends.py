"""Sends: durable before `send` returns, from many tasks at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ackbone import App
from bench import plain, workload
from bench.figures import Row, at_least
from bench.measure import Bench

TASKS = 64


def section(bench: Bench) -> list[Row]:
    """64 tasks that each await every send, beside one commit per message."""
    count, few = bench.size(20_000, least=TASKS), bench.size(4_000, least=50)

    def one_by_one() -> dict[str, float]:
        with bench.home() as home:
            return {"single": few / plain.send(home, few, per_commit=1)}

    def in_bulk() -> dict[str, float]:
        with bench.home() as home:
            return {"bulk": count / plain.send(home, count, per_commit=500)}

    def ours(tasks: int, total: int, key: str) -> dict[str, float]:
        with bench.home() as home:
            return {key: total / asyncio.run(send_all(home, tasks, total))}

    seen = bench.take_turns(
        {
            "plain, a commit each": one_by_one,
            "plain, 500 a commit": in_bulk,
            "64 tasks": lambda: ours(TASKS, count, "many"),
            "1 task": lambda: ours(1, few, "one"),
        }
    )
    single = _row("plain sqlite3, a commit per message", seen["single"])
    bulk = _row("plain sqlite3, 500 messages a commit", seen["bulk"])
    return [
        single,
        bulk,
        _row("ackbone, 64 tasks", seen["many"], beside=single, goal=8),
        _row("ackbone, 64 tasks, beside batches", seen["many"], beside=bulk),
        _row("ackbone, 1 task", seen["one"], beside=single),
    ]


async def send_all(home: Path, tasks: int, total: int, broker: str = "sqlite") -> float:
    """Seconds that so many tasks need for so many sends, each awaited."""
    async with workload.open_app(home, broker) as app:
        begin = time.perf_counter()
        await asyncio.gather(*(_send_each(app, range(n, total, tasks)) for n in range(tasks)))
        return time.perf_counter() - begin


async def _send_each(app: App, numbers: range) -> None:
    for n in numbers:
        await app.send(workload.NOOP, workload.payload(n))


def _row(
    name: str, values: tuple[float, ...], *, beside: Row | None = None, goal: float | None = None
) -> Row:
    return Row(
        section="sends",
        name=name,
        unit="msg/s",
        values=values,
        beside=beside,
        goal=None if goal is None else at_least(goal),
    )
