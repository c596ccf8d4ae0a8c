"""A worker that watches itself: `python -m bench.sampler TARGET REPORT` drains, then reports.

Two instruments, both cheap enough to leave the rates nearly as they are:
- a thread looks at the stacks of all others about five hundred times a second, and at the CPU time
  that each has used since the last look. A sample weighs as much as that CPU time, so a thread that
  waits weighs nothing.
- connections are a subclass that times every statement, on the clock and in CPU time.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ackbone.observe.logs import configure_logs
from ackbone.processes.worker_process import work

EVERY_S = 0.002
SWITCH_S = 0.0001
"""The interpreter's switch interval: with the usual 5 ms the sampler would mostly get its turn
where another thread lets go of the lock by itself, and would see those places too often."""

T = TypeVar("T")
_TABLE = re.compile(r"\b(?:FROM|INTO|UPDATE|JOIN)\s+([a-z_]+)")
_VERB = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE)\b")
_WAITS = {("threading.py", "wait"), ("selectors.py", "select"), ("threading.py", "_wait")}
WAITING = "waiting"
SQL = "SQL "
_statement: dict[int, str] = {}
"""The statement that each thread is in."""


@functools.lru_cache(maxsize=4096)
def label(sql: str) -> str:
    """A short name for a statement: what it does, and to which table."""
    words = sql.split(None, 2)
    if words[0] in ("BEGIN", "COMMIT", "ROLLBACK", "RELEASE", "SAVEPOINT", "PRAGMA"):
        return " ".join(words[:2]) if words[0] == "PRAGMA" else words[0]
    body = sql[sql.index(") UPDATE") :] if ") UPDATE" in sql else sql
    verb, table = _VERB.search(body), _TABLE.search(body)
    returning = " RETURNING" if " RETURNING " in sql else ""
    return f"{verb[0] if verb else words[0]} {table[1] if table else ''}{returning}".strip()


class Statements:
    """Calls, clock and CPU time by thread and statement."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[int]]] = {}

    def timed(self, sql: str, call: Callable[[], T]) -> T:
        name = label(sql)
        ident = threading.get_ident()
        _statement[ident] = name
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return call()
        finally:
            wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
            _statement.pop(ident, None)
            thread = self.found.setdefault(threading.current_thread().name, {})
            entry = thread.setdefault(name, [0, 0, 0])
            entry[0] += 1
            entry[1] += wall
            entry[2] += cpu


STATEMENTS = Statements()


class TimedCursor(sqlite3.Cursor):
    """Rows are found while they are fetched, so fetching counts too."""

    _sql = ""

    def execute(self, sql: str, *parameters: Any) -> TimedCursor:
        self._sql = sql
        return STATEMENTS.timed(sql, lambda: super(TimedCursor, self).execute(sql, *parameters))

    def executemany(self, sql: str, *parameters: Any) -> TimedCursor:
        self._sql = sql
        return STATEMENTS.timed(sql, lambda: super(TimedCursor, self).executemany(sql, *parameters))

    def fetchall(self) -> list[Any]:
        return STATEMENTS.timed(self._sql or "SELECT", super().fetchall)


class TimedConnection(sqlite3.Connection):
    """A connection whose statements are timed."""

    def execute(self, sql: str, *parameters: Any) -> TimedCursor:
        return self.cursor(TimedCursor).execute(sql, *parameters)

    def executemany(self, sql: str, *parameters: Any) -> TimedCursor:
        return self.cursor(TimedCursor).executemany(sql, *parameters)


class Sampler(threading.Thread):
    """Stacks and CPU time of all other threads, until told to stop."""

    def __init__(self) -> None:
        super().__init__(name="bench-sampler", daemon=True)
        self.samples: list[tuple[int, str, str, str, int]] = []
        """Wall clock µs, thread, step, function, CPU ns since the last look."""
        self._stop_wanted = threading.Event()
        self._cpu: dict[int, int] = {}

    def run(self) -> None:
        while not self._stop_wanted.wait(EVERY_S):
            names = {t.ident: t.name for t in threading.enumerate() if t is not self}
            now = time.time_ns() // 1000
            for ident, frame in sys._current_frames().items():
                name = names.get(ident)
                if name is not None:
                    step, function = place(ident, frame)
                    self.samples.append((now, name, step, function, self._used(ident)))

    def stop(self) -> None:
        self._stop_wanted.set()
        self.join()

    def _used(self, ident: int) -> int:
        try:
            clock = time.pthread_getcpuclockid(ident)
            now = time.clock_gettime_ns(clock)
        except OSError:  # it ended meanwhile
            return 0
        used = now - self._cpu.get(ident, now)
        self._cpu[ident] = now
        return used


def place(ident: int, frame: FrameType | None) -> tuple[str, str]:
    """The step and the function of ours that a stack is in; a statement is a step of its own."""
    leaf = frame
    if leaf is not None and (Path(leaf.f_code.co_filename).name, leaf.f_code.co_name) in _WAITS:
        return WAITING, WAITING
    statement = _statement.get(ident)
    while frame is not None:
        code = frame.f_code
        _, found, inside = code.co_filename.partition("/ackbone/")
        if found and not code.co_filename.startswith("<"):
            module = inside.removesuffix(".py")
            return (SQL + statement if statement else module), f"{module}:{code.co_qualname}"
        frame = frame.f_back
    if leaf is None:
        return "other", "other"
    return Path(leaf.f_code.co_filename).parent.name, leaf.f_code.co_name


def main(target: str, report: Path) -> int:
    configure_logs()
    sqlite3.connect = functools.partial(sqlite3.connect, factory=TimedConnection)  # type: ignore[assignment]
    sys.setswitchinterval(SWITCH_S)
    sampler = Sampler()
    sampler.start()
    code = asyncio.run(work(target, until_idle=True))
    sampler.stop()
    report.write_text(json.dumps({"samples": sampler.samples, "statements": STATEMENTS.found}))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
