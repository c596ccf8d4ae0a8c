"""PostgreSQL alone: queue and store in one database, beside Procrastinate, and a long queue."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import processes, workload
from bench.figures import Row, at_least, at_most
from bench.measure import Bench, Unavailable
from bench.postgres_drain import Stage, drain, drain_for
from bench.postgres_server import PostgresServer, has_postgres
from bench.server_peers import HERE, TICKS, ticks_rate, versions_of

from .backlog import FEW, MANY, TIMES
from .drain import MANY_SLOTS

RESERVE = 400_000
"""What all turns take off the long queue at most. It is there from the beginning."""
_SECONDS, _LONG_S = 4.0, 10.0
PEER = "procrastinate"


def section(bench: Bench) -> list[Row]:
    """Every guarantee on, against jobs that are kept and not deduplicated; then a million."""
    if not has_postgres():
        raise Unavailable("postgres is missing (Debian package postgresql)")
    return [*_drains(bench), *_backlog(bench)]


@contextlib.contextmanager
def _stage(bench: Bench) -> Iterator[Stage]:
    with bench.home() as home, PostgresServer(bench.folder.parent) as server:
        yield Stage(home, server)


def _drains(bench: Bench) -> list[Row]:
    count, few = bench.size(40_000, least=400), bench.size(4_000, least=50)

    def ours(name: str, workers: int) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            with _stage(bench) as stage:
                stage.fill(count)
                return {name: drain(stage, count, workers=workers)}

        return run

    contenders: dict[str, Callable[[], dict[str, float]]] = {}
    versions = {} if bench.peers is None else versions_of(bench.peers)
    python = bench.peers
    if python is not None and PEER in versions:
        contenders["procrastinate"] = lambda: {"peer": _procrastinate(bench, python, few)}
    else:
        bench.say("no procrastinate: 'make bench' installs it")
    contenders["ackbone"] = ours("one", 1)
    contenders["ackbone, 2 processes"] = ours("two", 2)
    seen = bench.take_turns(contenders)
    peer = None
    if "peer" in seen:
        peer = _row(f"Procrastinate {versions[PEER]}, 1 process", seen["peer"])
    one = Row(
        section="postgres",
        name=f"ackbone, 1 process, {MANY_SLOTS} slots",
        unit="msg/s",
        values=seen["one"],
        beside=peer,
        goal=None if peer is None else at_least(5),
    )
    two = Row(
        section="postgres",
        name="ackbone, 2 processes",
        unit="msg/s",
        values=seen["two"],
        beside=one,
    )
    return [*([peer] if peer is not None else []), one, two]


def _procrastinate(bench: Bench, python: Path, count: int) -> float:
    with bench.home() as home, PostgresServer(bench.folder.parent) as server:
        ticks = home / "ticks"
        ticks.write_bytes(bytes(TICKS.size))
        env = {"BENCH_URL": server.url, "BENCH_TICKS": str(ticks), "PYTHONPATH": str(HERE)}
        fill = [str(python), "procrastinate_app.py", str(workload.write_messages(home, count))]
        with processes.Measured(fill, log=home / "fill.log", cwd=HERE, env=env) as filling:
            filling.wait()
        os.sync()
        work = [str(python), "procrastinate_app.py", "work"]
        with processes.Measured(work, log=home / "peer.log", cwd=HERE, env=env) as child:
            return ticks_rate(ticks, count, child)


def _backlog(bench: Bench) -> list[Row]:
    """The same worker on a short and on a long queue, in turns: ten thousand messages of each."""
    few, many = bench.size(FEW, least=200), bench.size(MANY, least=1000)

    def short() -> dict[str, float]:
        with _stage(bench) as stage:
            stage.fill(few)
            return {"short": drain(stage, few)}

    with _stage(bench) as long_stage:
        bench.say(f"filling a queue with {many:,} messages, and those that will be drained")
        long_stage.fill(many + bench.size(RESERVE))
        waits = [bench.seconds(_LONG_S)]

        def long() -> dict[str, float]:
            seconds = waits.pop() if waits else bench.seconds(_SECONDS)
            rate, peak = drain_for(long_stage, seconds, first=few)
            return {"long": rate, "memory": peak}

        turns = {f"{few:,} waiting": short, f"{many:,} waiting": long}
        seen = bench.take_turns(turns, times=TIMES)
    base = _row(f"drain, {few:,} waiting", seen["short"])
    return [
        base,
        Row(
            section="postgres",
            name=f"drain, {many:,} waiting",
            unit="msg/s",
            values=seen["long"],
            note="turn by turn",
            paired=True,
            beside=base,
            goal=at_least(0.9),
        ),
        Row(
            section="postgres",
            name="the worker's memory, peak",
            unit="MB",
            values=seen["memory"],
            lower_is_better=True,
            goal=at_most(150),
        ),
    ]


def _row(name: str, values: tuple[float, ...]) -> Row:
    return Row(section="postgres", name=name, unit="msg/s", values=values)
