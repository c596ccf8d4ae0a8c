"""`--profile`: where the time of one message goes, by thread, step, statement and function."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import processes, redis_drain, workload
from .figures import markdown
from .measure import Bench
from .redis_server import RedisServer
from .sampler import SQL, WAITING
from .sections.drain import drain, read_back

LOOP, WRITER = "event loop", "writer thread"
_TOP = 25
_LEAST_US = 0.3
STEPS = {
    "brokers/sqlite": "take rows of the queue",
    "engine/decoder": "decode",
    "core/codecs/standard": "decode",
    "core/codecs/values": "decode",
    "core/message": "decode",
    "core/ids": "ids",
    "store/claims": "claim",
    "store/taking": "claim",
    "store/tasks": "claim",
    "store/sqlite/task_rows": "claim",
    "store/sqlite/ledger": "ledger: JSON and hash chain",
    "store/finish": "finish",
    "store/sqlite/store": "finish",
    "sqlitefile/rows": "values of statements",
    "sqlitefile/file": "writer thread's own work",
    "sqlitefile/sharing": "turnstile and wake-up",
    "sqlitefile/wal": "witness and log",
    "engine/executor": "run: task, context, handler, outcome",
    "engine/context": "run: task, context, handler, outcome",
    "engine/handlers": "run: task, context, handler, outcome",
    "engine/deadlines": "run: task, context, handler, outcome",
    "core/breaker": "run: task, context, handler, outcome",
    "engine/fetcher": "fetch and settle loops",
    "engine/settler": "fetch and settle loops",
    "engine/steps": "fetch and settle loops",
    "engine/flow": "fetch and settle loops",
    "asyncio": "asyncio itself",
    "core/codecs/task": "decode",
    "core/codecs/codec": "decode",
    "core/notices": "results, acknowledgements",
    "brokers/redis/entries": "entries from and to fields",
    "brokers/redis/wire": "Redis: commands and answers",
    "brokers/redis/broker": "results, acknowledgements",
    "brokers/redis/settlements": "results, acknowledgements",
    "brokers/redis/once": "results, acknowledgements",
    "brokers/redis/group": "read from the group",
    "store/keys": "claim",
    "store/sqlite/key_rows": "claim",
}
"""Modules by the step of a message that they are; one that is not named stands for itself."""


@dataclass(frozen=True)
class Profile:
    """CPU µs per message."""

    messages: int
    wall_us: float
    plain_wall_us: float
    """The same drain without instruments."""
    steps: dict[tuple[str, str], float]
    """By (thread, step)."""
    functions: dict[tuple[str, str], float]
    statements: dict[str, tuple[float, float, float]]
    """Of the writer thread: calls per 1,000 messages, clock µs and CPU µs per message."""

    def total(self, thread: str) -> float:
        return sum(us for (where, _), us in self.steps.items() if where == thread)


def measure(bench: Bench, *, keyed: bool = False) -> Profile:
    """Drain without and with the instruments; of all rounds the one with the least CPU time.

    Whatever else runs on the machine can only add to it.
    """
    return _least(_measure(bench, keyed) for _ in range(bench.rounds))


def measure_tasks(bench: Bench) -> Profile:
    """The same of tasks on Redis."""
    return _least(_measure_tasks(bench) for _ in range(bench.rounds))


def _least(found: Iterable[Profile]) -> Profile:
    return min(found, key=lambda profile: profile.total(LOOP) + profile.total(WRITER))


def _measure(bench: Bench, keyed: bool) -> Profile:
    count = bench.size(20_000, least=500)
    with bench.home() as home:
        workload.fill(home, count, keyed=keyed)
        plain = drain(home, count)
    with bench.home() as home:
        workload.fill(home, count, keyed=keyed)
        return _watched(home, {}, count, plain.seconds)


def _measure_tasks(bench: Bench) -> Profile:
    count = bench.size(20_000, least=500)
    with bench.home() as home, RedisServer(home) as server:
        stage = redis_drain.Stage(home, server, slots=redis_drain.MANY_SLOTS)
        stage.fill(count)
        redis_drain.drain(stage, count)
        plain = read_back(home)
    with bench.home() as home, RedisServer(home) as server:
        stage = redis_drain.Stage(home, server, slots=redis_drain.MANY_SLOTS)
        stage.fill(count)
        return _watched(home, stage.env, count, plain.seconds)


def _watched(home: Path, env: Mapping[str, str], count: int, plain_s: float) -> Profile:
    """One worker under the instruments empties what waits for it."""
    report = home / "profile.json"
    command = [sys.executable, "-m", "bench.sampler", processes.APP, str(report)]
    with processes.Measured(
        command,
        log=home / "worker.log",
        cwd=processes.ROOT,
        env={"ACKBONE_HOME": str(home), **env},
    ) as child:
        child.wait()
    seconds = read_back(home).seconds
    found = json.loads(report.read_text())
    return summarise(found, count=count, seconds=seconds, plain=plain_s, window=_window(home))


def _window(home: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(workload.database(home))) as conn:
        first, last = conn.execute(
            "SELECT min(started_at), max(completed_at) FROM queue_executions"
        ).fetchone()
    return first, last


def summarise(
    found: dict[str, Any], *, count: int, seconds: float, plain: float, window: tuple[int, int]
) -> Profile:
    """Samples and statements as µs per message. Samples before and after the drain are left out."""
    begin, end = window
    used: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    steps: Counter[tuple[str, str]] = Counter()
    functions: Counter[tuple[str, str]] = Counter()
    for at, thread, step, function, cpu_ns in found["samples"]:
        if begin <= at <= end:
            where = _thread(thread)
            used[where] += cpu_ns
            if step != WAITING and not step.startswith(SQL):
                seen[where] += cpu_ns
                steps[where, STEPS.get(step, step)] += cpu_ns
                functions[where, function] += cpu_ns
    statements = _statements(found["statements"], count)
    # Statements are timed, exactly; the rest of a thread's CPU time is shared out by what it was
    # seen at. A thread that waits at the look may have worked since the last one.
    exact = Counter({WRITER: sum(cpu for _, _, cpu in statements.values())})
    share = {
        where: max(0.0, used[where] / 1e3 / count - exact[where]) / ns
        for where, ns in seen.items()
        if ns
    }
    by_step = {key: ns * share[key[0]] for key, ns in steps.items() if ns}
    by_step |= {(WRITER, SQL + name): cpu for name, (_, _, cpu) in statements.items()}
    return Profile(
        messages=count,
        wall_us=seconds / count * 1e6,
        plain_wall_us=plain / count * 1e6,
        steps=by_step,
        functions={key: ns * share[key[0]] for key, ns in functions.items() if ns},
        statements=statements,
    )


def _statements(
    found: dict[str, dict[str, tuple[int, int, int]]], count: int
) -> dict[str, tuple[float, float, float]]:
    """Those of the writer thread; others only read, off the way of a message."""
    return {
        name: (calls / count * 1000, wall / 1e3 / count, cpu / 1e3 / count)
        for thread, theirs in found.items()
        if _thread(thread) == WRITER
        for name, (calls, wall, cpu) in theirs.items()
    }


def _thread(name: str) -> str:
    if name == "MainThread":
        return LOOP
    return WRITER if name.startswith("ackbone-writer") else "other threads"


def text(profile: Profile) -> str:
    """The profile as Markdown."""
    both = profile.total(LOOP) + profile.total(WRITER)
    head = (
        f"{profile.messages:,} messages, {profile.wall_us:.1f} µs each on the clock with the "
        f"instruments, {profile.plain_wall_us:.1f} µs without. CPU time: {LOOP} "
        f"{profile.total(LOOP):.1f} µs, {WRITER} {profile.total(WRITER):.1f} µs, together "
        f"{both:.1f} µs a message."
    )
    parts = [
        head,
        "CPU µs per message, by step:",
        _steps_table(profile),
        "Statements, per message:",
        _statements_table(profile),
        f"The {_TOP} functions with the most CPU time outside of SQL:",
        _functions_table(profile),
    ]
    return "\n\n".join(parts)


def _steps_table(profile: Profile) -> str:
    names = {step for _, step in profile.steps}
    lines: list[tuple[str, float, float, float]] = []
    for name in names:
        each = [profile.steps.get((thread, name), 0.0) for thread in (LOOP, WRITER)]
        lines.append((name, each[0], each[1], sum(each)))
    lines.sort(key=lambda line: -line[3])
    kept = [line for line in lines if line[3] >= _LEAST_US]
    small = [line for line in lines if line[3] < _LEAST_US]
    loop, writer = sum(line[1] for line in small), sum(line[2] for line in small)
    kept.append(("everything smaller", loop, writer, loop + writer))
    return _numbers(("step", LOOP, WRITER, "both"), kept)


def _statements_table(profile: Profile) -> str:
    lines = [(name, *values) for name, values in profile.statements.items()]
    lines.sort(key=lambda line: -line[2])
    kept = [line for line in lines if line[2] >= _LEAST_US / 3]
    return _numbers(("statement", "calls per 1,000", "clock µs", "CPU µs"), kept)


def _functions_table(profile: Profile) -> str:
    top = sorted(profile.functions.items(), key=lambda item: -item[1])[:_TOP]
    lines = [(f"{function} ({thread})", us) for (thread, function), us in top]
    return _numbers(("function", "CPU µs"), lines)


def _numbers(head: tuple[str, ...], lines: Iterable[tuple[Any, ...]]) -> str:
    cells = [(line[0], *(f"{value:.1f}" for value in line[1:])) for line in lines]
    return markdown([head, *cells], right=frozenset(range(1, len(head))))
