"""Two busy processes on one file: the turnstile lets neither starve.

The promise is a share of 40 to 60 % each and a p99 of 50 ms; what was seen is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from ackbone.sqlitefile.file import close_file, open_file
from ackbone.store.sqlite.migrate import ensure_schema
from tests.conftest import ALLOWANCE, SOAK

SECONDS = 20.0 if SOAK else 3.0
WRITER = Path(__file__).with_name("busy_writer.py")
SHARE = (0.4, 0.6)
P99_MS = 50.0
OPENINGS = 3000 if SOAK else 300


def test_neither_of_two_writers_starves(home: Path) -> None:
    database = home / "ackbone.db"
    ensure_schema(database)
    writers = [
        subprocess.Popen(
            [sys.executable, str(WRITER), str(database), str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert _pipe(writer.stdout).readline() == "ready\n"
        for writer in writers:
            _pipe(writer.stdin).write("go\n")
            _pipe(writer.stdin).flush()
        seen: list[dict[str, Any]] = [json.loads(w.communicate()[0]) for w in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    total = sum(writer["writes"] for writer in seen)
    share = seen[0]["writes"] / total
    print(f"{total} commits in {SECONDS:.0f} s; share of the first {share:.1%}; {seen}")
    slack = (SHARE[1] - 0.5) * ALLOWANCE
    assert 0.5 - slack < share < 0.5 + slack
    assert all(writer["p99_ms"] < P99_MS * ALLOWANCE for writer in seen)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def test_a_file_that_others_write_to_is_never_called_damaged(home: Path) -> None:
    """Witness and database are compared without the write lock, in the midst of commits."""
    database = home / "ackbone.db"
    ensure_schema(database)
    command = [sys.executable, str(WRITER), str(database), "600"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert _pipe(writer.stdout).readline() == "ready\n"
            _pipe(writer.stdin).write("go\n")
            _pipe(writer.stdin).flush()
            for _ in range(OPENINGS):
                close_file(open_file(database))
        finally:
            writer.kill()
