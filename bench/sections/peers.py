"""Peers: other queues on SQLite, at their best settings, in an environment of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from bench import processes, workload
from bench.figures import Row, at_least
from bench.measure import Bench, Unavailable
from bench.server_peers import HERE, TICKS, ticks_rate, versions_of

from .drain import MANY_SLOTS, drain


def section(bench: Bench) -> list[Row]:
    """Huey with and without syncs, litequeue, and ackbone with every guarantee.

    Huey keeps nothing of a task that returns nothing, and forgets one that it was killed over;
    what a task returns it keeps in a commit of its own. Both ways are shown.
    All at their best settings: of ackbone that is one, the number of slots.
    """
    python = bench.peers
    if python is None:
        raise Unavailable("ACKBONE_BENCH_PEERS names no interpreter; 'make bench' sets it")
    versions = versions_of(python)
    if "huey" not in versions:
        raise Unavailable(f"{python} has no huey: run 'make bench', which installs it")
    few, count = bench.size(4_000, least=50), bench.size(20_000, least=200)

    def ours(name: str, kind: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            with bench.home() as home:
                workload.fill(home, count, kind=kind)
                return {name: drain(home, count, slots=MANY_SLOTS).rate}

        return run

    contenders: dict[str, Callable[[], dict[str, float]]] = {
        "ackbone": ours("ours", workload.NOOP),
        "ackbone, results": ours("ours kept", workload.ANSWER),
        "huey, synced": lambda: {"huey": _huey(bench, python, few, "full")},
        "huey, synced, results": lambda: {"huey kept": _huey(bench, python, few, "full", "kept")},
        "huey, not synced": lambda: {"huey off": _huey(bench, python, few, "off")},
    }
    if "litequeue" in versions:
        contenders["litequeue"] = lambda: {"lite": _litequeue(bench, python, few)}
    seen = bench.take_turns(contenders)
    huey = _row(f"Huey {versions['huey']}, fsync=True", seen["huey"])
    huey_kept = _row(f"Huey {versions['huey']}, fsync=True, results kept", seen["huey kept"])
    huey_off = _row(
        f"Huey {versions['huey']}, fsync=False", seen["huey off"], note="loses at a power cut"
    )
    rows = [
        huey,
        huey_kept,
        huey_off,
        _row(f"ackbone, 1 process, {MANY_SLOTS} slots", seen["ours"], beside=huey, goal=5),
        _row("ackbone, both with results", seen["ours kept"], beside=huey_kept, goal=5),
        _row("ackbone, beside Huey without syncs", seen["ours"], beside=huey_off),
    ]
    if "lite" in seen:
        lite = _row(
            f"litequeue {versions['litequeue']}, pop and done",
            seen["lite"],
            note="synchronous=NORMAL",
        )
        rows += [lite, _row("ackbone, beside litequeue", seen["ours"], beside=lite)]
    return rows


def _huey(bench: Bench, python: Path, count: int, fsync: str, results: str = "none") -> float:
    """One consumer thread, polling without pause: more of them wait for the same lock."""
    with bench.home() as home:
        ticks = home / "ticks"
        ticks.write_bytes(bytes(TICKS.size))
        env = {
            "BENCH_DB": str(home / "huey.db"),
            "BENCH_TICKS": str(ticks),
            "BENCH_RESULTS": results,
        }
        fill = [str(python), "-m", "huey_fill", str(workload.write_messages(home, count))]
        with processes.Measured(
            fill,
            log=home / "fill.log",
            cwd=HERE,
            env={**env, "BENCH_FSYNC": "off"},
        ) as filling:
            filling.wait()
        os.sync()
        consumer = [str(python.with_name("huey_consumer")), "huey_app.huey"]
        with processes.Measured(
            [*consumer, "-w", "1", "-k", "thread", "-q", "-n", "-C", "-d", "0.001"],
            log=home / "huey.log",
            cwd=HERE,
            env={**env, "BENCH_FSYNC": fsync, "PYTHONPATH": str(HERE)},
        ) as child:
            return ticks_rate(ticks, count, child)


def _litequeue(bench: Bench, python: Path, count: int) -> float:
    with bench.home() as home:
        script = str(HERE / "litequeue_loop.py")
        with processes.Measured(
            [str(python), script, str(workload.write_messages(home, count)), str(home / "lite.db")],
            log=home / "lite.log",
        ) as child:
            child.wait()
            return float(json.loads(child.tail)["rate"])


def _row(
    name: str,
    values: tuple[float, ...],
    *,
    beside: Row | None = None,
    goal: float | None = None,
    note: str = "",
) -> Row:
    return Row(
        section="peers",
        name=name,
        unit="msg/s",
        values=values,
        beside=beside,
        goal=None if goal is None else at_least(goal),
        note=note,
    )
