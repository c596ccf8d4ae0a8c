"""What every section gets: its sizes, a folder, and a way to say what it is doing."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .figures import Row


class Unavailable(Exception):
    """A section that cannot be measured here; says why and what would help."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run of the bench."""

    folder: Path
    """Where databases are made: on the disk that is to be measured."""
    rounds: int = 3
    scale: float = 1.0
    peers: Path | None = None
    """The interpreter of the environment with the other queues."""
    quiet: bool = False

    def size(self, full: int, least: int = 1) -> int:
        """A count at this run's scale."""
        return max(least, round(full * self.scale))

    def seconds(self, full: float) -> float:
        """A time at this run's scale, a second at least."""
        return max(1.0, min(1.0, self.scale) * full)

    @contextlib.contextmanager
    def home(self) -> Iterator[Path]:
        """A new folder with a short name (sockets are bound below it), gone afterwards."""
        path = Path(tempfile.mkdtemp(prefix="abb-", dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def say(self, text: str) -> None:
        if not self.quiet:
            print(f"· {text}", file=sys.stderr, flush=True)

    def take_turns(
        self, contenders: Mapping[str, Callable[[], dict[str, float]]], *, times: int = 1
    ) -> dict[str, tuple[float, ...]]:
        """Let each contender run `times` per round; the figures of each name, turn by turn.

        Taking turns spreads whatever else the machine does over all of them.
        """
        found: dict[str, list[float]] = {}
        turns = self.rounds * times
        for turn in range(turns):
            for name, run in contenders.items():
                figures = run()
                shown = ", ".join(f"{key} {value:,.4g}" for key, value in figures.items())
                self.say(f"round {turn + 1}/{turns}  {name}: {shown}")
                for key, value in figures.items():
                    found.setdefault(key, []).append(value)
        return {name: tuple(values) for name, values in found.items()}


Section = Callable[[Bench], list[Row]]
