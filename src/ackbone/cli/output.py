"""Output of the commands: data on standard output, messages for people on standard error.

Text from messages is not trusted: characters that could move the cursor, change colours or reverse
the direction of a line are shown as escapes.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import click
import msgspec

from ackbone.core.text import one_line

_TIMES = "_us"


def safe(text: object) -> str:
    """Return a value as text on one line, with control characters shown as escapes."""
    return one_line(str(text))


def plain(value: Any) -> Any:
    """Return a value for JSON: times as ISO 8601 (`at_us` becomes `at`), bytes as base64."""
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return plain({name: item for name, item in fields if item is not msgspec.UNSET})
    if isinstance(value, Mapping):
        return dict(_named(str(key), item) for key, item in value.items())
    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Path | BaseException):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


def plain_without(value: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Return a struct for JSON without these fields."""
    return {name: item for name, item in plain(value).items() if name not in names}


def _named(name: str, value: Any) -> tuple[str, Any]:
    if name.endswith(_TIMES) and (value is None or isinstance(value, int)):
        return name.removesuffix(_TIMES), None if value is None else iso(value)
    return name, plain(value)


def dump(value: Any, *, indent: int | None = None) -> str:
    """Return a JSON document in ASCII, which no terminal interprets."""
    return json.dumps(plain(value), ensure_ascii=True, indent=indent).replace("\x7f", "\\u007f")


def iso(us: int) -> str:
    """Return microseconds as ISO 8601 in UTC. A time outside the calendar stays a number."""
    try:
        moment = datetime.fromtimestamp(us / 1e6, UTC)
    except (OverflowError, ValueError, OSError):
        return str(us)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def when(us: int | None, *, fine: bool = False) -> str:
    """Return a time for people, in UTC; `fine` adds milliseconds."""
    if us is None:
        return "-"
    text = iso(us)
    return text[:23].replace("T", " ") if fine else text[:19].replace("T", " ")


def cut(text: str, length: int = 60) -> str:
    """Return at most `length` characters; a text that was cut ends with an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def span(seconds: float | None) -> str:
    """Return a rounded duration: 850 ms, 12 s, 3 min, 2 h, 4 d."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def width_of(text: str) -> int:
    """Return the terminal columns of a text: two per wide character, none per combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


class Output:
    """The output of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def data(self, value: Any, text: str | None = None) -> None:
        """Write one record: as JSON with --json, else its text."""
        if self.as_json:
            click.echo(dump(value))
        elif text is not None:
            click.echo(text)

    def line(self, text: str = "") -> None:
        """Write a line for people. It is left out with --json."""
        if not self.as_json:
            click.echo(text)

    def fields(self, *pairs: tuple[str, object]) -> None:
        """Write a line for each label and value, without empty values."""
        for label, value in pairs:
            if value not in (None, ""):
                self.line(f"  {label:<9} {safe(value)}")

    def say(self, text: str) -> None:
        """Write to standard error, with and without --json."""
        for line in text.split("\n"):
            click.echo(safe(line), err=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[tuple[Any, Sequence[object]]],
        *,
        nothing: str | None = None,
    ) -> None:
        """Write records with their cells: one JSON line each with --json, else one table.

        `nothing` is said instead of a table without rows.
        """
        if self.as_json:
            for record, _ in rows:
                click.echo(dump(record))
            return
        if not rows and nothing is not None:
            self.say(nothing)
            return
        cells = [[safe(cell) for cell in cells] for _, cells in rows]
        widths = [
            max([width_of(name), *(width_of(row[n]) for row in cells)])
            for n, name in enumerate(columns)
        ]
        click.echo(self.strong(_row([name.upper() for name in columns], widths)))
        for row in cells:
            click.echo(_row(row, widths))

    def strong(self, text: str) -> str:
        return click.style(text, bold=True) if self.colours else text

    def tinted(self, text: str, colour: str | None) -> str:
        return click.style(text, fg=colour) if colour and self.colours else text

    @property
    def colours(self) -> bool:
        return not self.as_json and wants_colour(sys.stdout)

    @contextmanager
    def progress(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes the number of items done since its last call.

        The bar is drawn on a terminal only.
        """
        if not wants_colour(sys.stderr) or self.as_json:
            yield lambda count: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        bar = Progress(
            "{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        with bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)


def wants_colour(stream: Any) -> bool:
    """Return True for a terminal, unless NO_COLOR or TERM=dumb asks for plain text."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell + " " * (width - width_of(cell)) for cell, width in zip(cells, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()
