"""Compare two trees of the project, turn by turn: `python -m bench.compare OLD_TREE drain sends`.

Each tree has an environment of its own (`make setup`). In each turn both trees measure the sections
once, in changing order. A ratio is the middle one of all turns, the new tree against the old one in
the same turn, so that a machine whose speed changes hurts both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEW = Path(__file__).parents[1]
WORST = 0.95
"""A ratio below this is marked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: no figure is worse than `WORST`; 1: at least one is."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("old", type=Path, help="the tree to compare with")
    parser.add_argument("sections", nargs="+", metavar="SECTION", help="as for python -m bench")
    parser.add_argument("--turns", type=int, default=5, help="how often each tree measures (5)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every size by this")
    options = parser.parse_args(arguments)
    turns: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for turn in range(options.turns):
        print(f"turn {turn + 1} of {options.turns}", file=sys.stderr, flush=True)
        order = [options.old, NEW] if turn % 2 else [NEW, options.old]
        seen = {tree: _rows(tree, options.sections, options.scale) for tree in order}
        turns.append((seen[options.old], seen[NEW]))
    worst = float("inf")
    names = [name for name in turns[0][1] if all(name in old for old, _ in turns)]
    if not names:
        parser.error("the two trees measure nothing of the same name")
    for name in names:
        ratios = [_ratio(old[name], new[name]) for old, new in turns if name in new]
        middle = statistics.median(ratios)
        worst = min(worst, middle)
        mark = "" if middle >= WORST else "  WORSE"
        print(f"{middle:6.2f} x  ({min(ratios):.2f} to {max(ratios):.2f})  {name}{mark}")
    return 0 if worst >= WORST else 1


def _rows(tree: Path, sections: Sequence[str], scale: float) -> dict[str, Any]:
    """The figures of one tree by name, those of peers left out."""
    command = [tree / ".venv/bin/python", "-m", "bench", "--json", "--rounds", "1"]
    found = subprocess.run(
        [*map(str, command), "--scale", str(scale), *sections],
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    )
    rows = json.loads(found.stdout)["rows"]
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["name"]
    return {
        f"{row['section']}: {row['name'].removeprefix(project).strip(' ,')} ({row['unit']})": row
        for row in rows
        if row["name"].startswith(project) or row["section"] in ("latency", "delivery")
    }


def _ratio(old: dict[str, Any], new: dict[str, Any]) -> float:
    """How much better the new figure is. Above 1 is better, whatever the unit."""
    before, after = float(old["best"]), float(new["best"])
    lower_is_better = old["unit"] in ("ms", "s", "MB", "us", "µs")
    return before / after if lower_is_better else after / before


if __name__ == "__main__":
    sys.exit(main())
