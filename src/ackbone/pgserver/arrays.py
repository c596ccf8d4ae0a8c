"""Columns of a batch as array literals.

The driver turns lists into arrays item by item in Python, which costs more than the statement; a
batch of texts joined at once costs next to nothing, and the server reads it as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MICROSECOND = "interval '1 microsecond'"
NOW = "(SELECT clock_timestamp())"
"""SQL: the time, read once per statement: an index cannot be searched by a time that changes."""
BEGUN = "transaction_timestamp()"
"""SQL: the time of transactions that write when something is due, or act on what is over.

Each transaction compares its begin with what this process knows of the clock, and due times that it
wrote move if the clock is set later. A due time by `clock_timestamp()` would move although it was
written by the new clock.
"""


def moment(expression: str) -> str:
    """SQL: integer microseconds as a timestamptz, exactly."""
    return f"(timestamptz 'epoch' + {expression} * {MICROSECOND})"


def us(expression: str) -> str:
    """SQL: a timestamptz as integer microseconds."""
    return f"(extract(epoch FROM {expression}) * 1000000)::bigint"


def texts(values: Sequence[str | None]) -> str:
    """A text[] of these."""
    if not values:
        return "{}"
    if None not in values:
        joined = '","'.join(values)  # type: ignore[arg-type] # there is no None in it
        if "\\" not in joined and joined.count('"') == 2 * (len(values) - 1):
            return f'{{"{joined}"}}'
    return "{" + ",".join(["NULL" if v is None else _quoted(v) for v in values]) + "}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A text[] for each column of these rows, of which there is at least one."""
    return [texts(column) for column in zip(*rows, strict=True)]


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def numbers(values: Iterable[float | None]) -> str:
    """An array of numbers or truth values."""
    return "{" + ",".join(["NULL" if v is None else str(v) for v in values]) + "}"


def blobs(values: Iterable[bytes | None]) -> str:
    """A bytea[] of these."""
    return "{" + ",".join(["NULL" if v is None else f'"\\\\x{v.hex()}"' for v in values]) + "}"


def ids(values: Iterable[bytes | None]) -> str:
    """A uuid[] of these."""
    return "{" + ",".join(["NULL" if v is None else v.hex() for v in values]) + "}"


def places(values: Iterable[int]) -> str:
    """A tid[] of places as `place_of` gives them."""
    return "{" + ",".join([f'"({v >> 16},{v & 0xFFFF})"' for v in values]) + "}"


def place_of(ctid: bytes) -> int:
    """Return the place of a row, page and line in one number, from the bytes of the driver."""
    return int.from_bytes(ctid, "big")
