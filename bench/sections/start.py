"""Start: what a person waits for, and what an importing program pays."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bench.figures import Row, at_most
from bench.measure import Bench
from bench.processes import ProcessFailed

_REPEATS = 5


def section(bench: Bench) -> list[Row]:
    """`ackbone --help` and `import ackbone`, from a cold process each time."""
    command = [str(Path(sys.executable).with_name("ackbone")), "--help"]

    def best(arguments: list[str]) -> float:
        return min(_seconds(arguments) for _ in range(_REPEATS))

    def run() -> dict[str, float]:
        bare = best([sys.executable, "-c", "pass"])
        return {
            "help": best(command),
            "bare": bare,
            "import": best([sys.executable, "-c", "import ackbone"]) - bare,
            "app": best([sys.executable, "-c", "from ackbone import App"]) - bare,
        }

    seen = bench.take_turns({"start": run})
    return [
        _row("python -c pass", seen["bare"]),
        _row("ackbone --help", seen["help"], limit=0.3),
        _row("import ackbone, above the bare interpreter", seen["import"]),
        _row("from ackbone import App, above the bare interpreter", seen["app"]),
    ]


def _seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode != 0:
        raise ProcessFailed(f"{arguments} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return took


def _row(name: str, values: tuple[float, ...], *, limit: float | None = None) -> Row:
    return Row(
        section="start",
        name=name,
        unit="s",
        values=values,
        lower_is_better=True,
        goal=None if limit is None else at_most(limit),
    )
