"""Figures, ratios and goals as values, and the one table that shows them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Goal:
    """What a figure, or its ratio to the one beside it, should reach."""

    of: Literal["ratio", "value"]
    sign: Literal[">=", "<="]
    limit: float

    def met_by(self, row: Row) -> bool | None:
        """Whether the row reaches it; None: the figure beside it is nothing to compare with."""
        if self.of == "ratio" and row.beside is None:
            raise ValueError(f"{row.name}: a goal of a ratio needs a figure beside it")
        seen = row.ratio if self.of == "ratio" else row.best
        if seen is None:
            return None
        return seen >= self.limit if self.sign == ">=" else seen <= self.limit

    def text(self, unit: str) -> str:
        sign = "≥" if self.sign == ">=" else "≤"
        return f"{sign} {self.limit:g} ×" if self.of == "ratio" else f"{sign} {self.limit:g} {unit}"


def at_least(ratio: float) -> Goal:
    """The ratio should be so high."""
    return Goal("ratio", ">=", ratio)


def at_most(value: float) -> Goal:
    """The figure should be so low."""
    return Goal("value", "<=", value)


def ratio_at_most(ratio: float) -> Goal:
    """The ratio should be so low."""
    return Goal("ratio", "<=", ratio)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of the table: every round's value, and the figure that it stands beside."""

    section: str
    name: str
    unit: str
    values: tuple[float, ...]
    lower_is_better: bool = False
    beside: Row | None = None
    goal: Goal | None = None
    note: str = ""
    paired: bool = False
    """Its ratio is the middle one of all turns, each against the turn of the other beside it: for
    many short turns, of which the best says more of the machine's best second than of either."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.name}: a figure needs at least one measurement")

    @property
    def best(self) -> float:
        return min(self.values) if self.lower_is_better else max(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest round."""
        return min(self.values), max(self.values)

    @property
    def ratio(self) -> float | None:
        """How many times the figure beside it: best against best, or turn by turn."""
        if self.beside is None or self.beside.best == 0:
            return None
        if self.paired:
            turns = zip(self.values, self.beside.values, strict=True)
            return statistics.median(own / other for own, other in turns)
        return self.best / self.beside.best

    @property
    def reached(self) -> bool | None:
        """None: there is no goal, or nothing to hold it against."""
        return None if self.goal is None else self.goal.met_by(self)

    def plain(self) -> dict[str, Any]:
        """The row for `--json`."""
        return {
            "section": self.section,
            "name": self.name,
            "unit": self.unit,
            "best": self.best,
            "values": list(self.values),
            "beside": self.beside.name if self.beside else None,
            "ratio": self.ratio,
            "goal": self.goal.text(self.unit) if self.goal else None,
            "reached": self.reached,
            "note": self.note,
        }


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed (nearest rank)."""
    if not samples:
        raise ValueError("no samples, no percentile")
    if not 0 < share <= 1:
        raise ValueError(f"a share is above 0 and at most 1, not {share}")
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def number(value: float) -> str:
    """Three digits that count, thousands apart, no false precision."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


_HEAD = ("section", "what", "best", "", "rounds", "times", "of", "goal", "")


def table(rows: Iterable[Row]) -> str:
    """All rows as one aligned Markdown table: read on a terminal, pasted into a page."""
    lines: list[tuple[str, ...]] = [_HEAD]
    last = ""
    for row in rows:
        lines.append(_cells(row, row.section if row.section != last else ""))
        last = row.section
    return markdown(lines, right=frozenset({2, 4, 5}))


def _cells(row: Row, section: str) -> tuple[str, ...]:
    low, high = row.spread
    return (
        section,
        row.name + (f" ({row.note})" if row.note else ""),
        number(row.best),
        row.unit,
        f"{number(low)} – {number(high)}" if len(row.values) > 1 else "",
        "" if row.ratio is None else f"{row.ratio:.2f} ×",
        row.beside.name if row.beside else "",
        row.goal.text(row.unit) if row.goal else "",
        {None: "", True: "yes", False: "NO"}[row.reached],
    )


def markdown(lines: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Lines of cells, the first one the heading, as an aligned Markdown table."""
    widths = [max(3, *(len(line[n]) for line in lines)) for n in range(len(lines[0]))]
    rule = [("-" * (w - 1) + ":") if n in right else "-" * w for n, w in enumerate(widths)]
    done = []
    for line in (lines[0], rule, *lines[1:]):
        cells = [
            cell.rjust(widths[n]) if n in right else cell.ljust(widths[n])
            for n, cell in enumerate(line)
        ]
        done.append("| " + " | ".join(cells) + " |")
    return "\n".join(done)
