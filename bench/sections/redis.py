"""Redis: the task protocol on Redis Streams, beside redis-py itself and other queues on Redis."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from bench import processes, server_peers, workload
from bench.figures import Goal, Row, at_least, at_most, ratio_at_most
from bench.measure import Bench
from bench.postgres_server import PostgresServer, has_postgres
from bench.redis_drain import CHUNK, MANY_SLOTS, Drained, Stage, drain, drain_for, rate
from bench.redis_server import RedisServer

from . import latency
from .backlog import FEW, MANY, RESERVE, TIMES
from .sends import TASKS

STORES = {"SQLite store": 4.0, "PostgreSQL store": 2.0}
"""How many times the fastest peer ackbone should be on each."""
_RAW = server_peers.HERE / "redis_raw.py"
_TURNS = 2
"""Of the drains, in each round: every contender meets another moment of the machine."""
_BACKLOG_SLOTS = 2000
"""With more, a queue of ten thousand is at its end soon."""
_SECONDS, _LONG_S = 2.0, 10.0
Figures = dict[str, tuple[float, ...]]
Contenders = dict[str, Callable[[], dict[str, float]]]


def section(bench: Bench) -> list[Row]:
    """Claim, ledger, result event and acknowledgement for each task; peers at their best."""
    return [*_drains(bench), *_publishing(bench), *_waiting(bench), *_backlog(bench)]


# -- drain ----------------------------------------------------------------------------------------


def _drains(bench: Bench) -> list[Row]:
    count = bench.size(20_000, least=600)
    idle: list[float] = []

    def ours(name: str, postgres: bool, workers: int) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            with _stage(bench, postgres) as stage:
                stage.fill(count)
                drained = drain(stage, count, workers=workers)
            return {name: drained.rate, f"{name} cpu": _cpu_us(drained, workers * min(idle))}

        return run

    def start_and_stop() -> dict[str, float]:
        """What a worker's start and stop cost alone, to take off."""
        with (
            bench.home() as home,
            RedisServer(home) as server,
            processes.worker(home, env=Stage(home, server).env) as child,
        ):
            child.wait()
            idle.append(child.cpu_s)
        return {"idle": idle[-1]}

    contenders: Contenders = {
        "a worker's start and stop": start_and_stop,
        "redis-py": lambda: {"raw": _raw(bench, "drain", bench.size(50_000, least=1000))},
    }
    peers = server_peers.installed(bench, server_peers.ON_REDIS)
    for label, peer in reversed(peers.items()):  # the fast ones right before ours
        contenders[label] = server_peers.contender(bench, label, peer, RedisServer)
    for name in STORES:
        postgres = name.startswith("PostgreSQL")
        if postgres and not has_postgres():
            bench.say(f"no row for the {name}: postgres is missing (Debian package postgresql)")
            continue
        contenders[f"ackbone, {name}"] = ours(name, postgres, 1)
        contenders[f"ackbone, {name}, 2 processes"] = ours(f"{name} two", postgres, 2)
    return _drain_rows(bench.take_turns(contenders, times=_TURNS), list(peers))


@contextlib.contextmanager
def _stage(bench: Bench, postgres: bool) -> Iterator[Stage]:
    """A new Redis, and a new store."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(bench.home())
        server = stack.enter_context(RedisServer(home))
        if not postgres:
            yield Stage(home, server, slots=MANY_SLOTS)
            return
        database = stack.enter_context(PostgresServer(bench.folder.parent))
        yield Stage(home, server, database.url, MANY_SLOTS, others_cpu_s=database.cpu_s)


def _cpu_us(drained: Drained, idle_s: float) -> float:
    """CPU µs a message, of workers and servers."""
    used = max(0.0, drained.workers_cpu_s - idle_s) + drained.servers_cpu_s
    return used / drained.count * 1e6


def _drain_rows(seen: Figures, peers: list[str]) -> list[Row]:
    raw = _row("redis-py, XREADGROUP 500 and one XACK", "msg/s", seen["raw"])
    rows = [raw, *(_row(label, "msg/s", seen[label]) for label in peers)]
    fastest = _fastest([seen[label] for label in peers])
    if fastest is not None:
        rows.append(fastest)
    for name, goal in STORES.items():
        if name not in seen:
            continue
        one = f"ackbone, {name}, {MANY_SLOTS} slots"
        if fastest is None:
            alone = _row(one, "msg/s", seen[name])
        else:
            alone = _paired(_row(one, "msg/s", seen[name], beside=fastest, goal=at_least(goal)))
        cpu = _row(f"CPU a message with servers, {name}", "µs", seen[f"{name} cpu"])
        rows += [
            alone,
            _row(
                f"ackbone, {name}, 2 processes",
                "msg/s",
                seen[f"{name} two"],
                beside=alone,
                goal=at_least(1),
            ),
            cpu,
            _row(
                f"CPU a message with servers, {name}, 2 processes",
                "µs",
                seen[f"{name} two cpu"],
                beside=cpu,
                goal=ratio_at_most(1.25),
            ),
        ]
    return rows


def _fastest(peers: list[tuple[float, ...]]) -> Row | None:
    """Of every turn the one that was the fastest then: the luckiest of all is held against us."""
    if not peers:
        return None
    return _row(
        "the fastest of these in each turn", "msg/s", tuple(map(max, zip(*peers, strict=True)))
    )


def _paired(row: Row) -> Row:
    return replace(row, paired=True, note="turn by turn")


# -- publish --------------------------------------------------------------------------------------


def _publishing(bench: Bench) -> list[Row]:
    count = bench.size(50_000, least=1000)

    seen = bench.take_turns(
        {
            "redis-py, publish": lambda: {"raw": _raw(bench, "publish", count)},
            "redis-py, publish tasks": lambda: {"tasks": _raw(bench, "tasks", count)},
            f"{TASKS} tasks send": lambda: {"each": _sent(bench, "each", count)},
            "batches are sent": lambda: {"batches": _sent(bench, "batches", count)},
        }
    )
    raw = _row(f"redis-py, {CHUNK} XADD of one field in a pipeline", "msg/s", seen["raw"])
    same = _row(f"redis-py, {CHUNK} XADD of a task in a pipeline", "msg/s", seen["tasks"])
    many_at_once = f"ackbone, send_many of {CHUNK}"
    each_alone = f"ackbone, {TASKS} tasks send"
    return [
        raw,
        same,
        _row(many_at_once, "msg/s", seen["batches"], beside=same, goal=at_least(0.5)),
        _row(f"{many_at_once}, beside one field", "msg/s", seen["batches"], beside=raw),
        _row(each_alone, "msg/s", seen["each"], beside=same),
    ]


def _sent(bench: Bench, what: str, count: int) -> float:
    with bench.home() as home, RedisServer(home) as server:
        command = [sys.executable, "-m", "bench.server_send", what, str(home), server.url]
        return processes.rate_of([*command, str(count)], home)


def _raw(bench: Bench, what: str, count: int) -> float:
    with bench.home() as home, RedisServer(home) as server:
        messages = workload.write_messages(home, count)
        command = [sys.executable, str(_RAW), what, str(messages)]
        return processes.rate_of(command, home, BENCH_URL=server.url)


# -- latency and backlog --------------------------------------------------------------------------


def _waiting(bench: Bench) -> list[Row]:
    count = bench.size(500, least=20)

    def run() -> dict[str, float]:
        with bench.home() as home, RedisServer(home) as server:
            return latency.measure(home, count, server.url)

    seen = bench.take_turns({f"{count} messages, each alone": run})
    return [
        _row("send → handler, median", "ms", seen["p50"], goal=at_most(3)),
        _row("send → handler, p99", "ms", seen["p99"], goal=at_most(10)),
        _row("send alone, median", "ms", seen["send p50"]),
        _row("send alone, p99", "ms", seen["send p99"]),
    ]


def _backlog(bench: Bench) -> list[Row]:
    few, many = bench.size(FEW, least=600), bench.size(MANY, least=2000)
    # At the end of a short queue nothing is read and claimed for later any more: for as many as
    # are under way, half of the work. A long one has no such end, so neither is looked at there.
    counted = few * 3 // 5

    def short() -> dict[str, float]:
        with bench.home() as home, RedisServer(home) as server:
            stage = Stage(home, server, slots=_BACKLOG_SLOTS)
            stage.fill(few)
            drain(stage, few)
            return {"short": rate(server, first=counted)}

    with bench.home() as home, RedisServer(home) as server:
        bench.say(f"filling a stream with {many:,} tasks, and those that will be drained")
        Stage(home, server).fill(many + bench.size(RESERVE))
        is_first = True

        def long() -> dict[str, float]:
            """As many messages as the others, into a store as empty as theirs: only what waits
            differs."""
            nonlocal is_first
            seconds, is_first = bench.seconds(_LONG_S if is_first else _SECONDS), False
            with bench.home() as store:
                stage = Stage(store, server, slots=_BACKLOG_SLOTS)
                stage.change_store()
                found, peak = drain_for(stage, seconds, first=counted)
            return {"long": found, "memory": peak}

        turns = {f"{few:,} waiting": short, f"{many:,} waiting": long}
        seen = bench.take_turns(turns, times=TIMES)
    base = _row(f"drain, {few:,} waiting", "msg/s", seen["short"])
    name = f"drain, {many:,} waiting"
    return [
        base,
        _paired(_row(name, "msg/s", seen["long"], beside=base, goal=at_least(0.9))),
        _row("the worker's memory, peak", "MB", seen["memory"]),
    ]


def _row(
    name: str,
    unit: str,
    values: tuple[float, ...],
    *,
    beside: Row | None = None,
    goal: Goal | None = None,
) -> Row:
    return Row(
        section="redis",
        name=name,
        unit=unit,
        values=values,
        lower_is_better=unit != "msg/s",
        beside=beside,
        goal=goal,
    )
