"""Statements over many rows.

One statement with many rows costs one hand-over of the interpreter lock; `executemany` costs one
per row, and a busy event loop makes each of those wait. Batches are cut into a few sizes, so that
SQLite compiles each form once.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

_SIZES = (200, 128, 100, 64, 32, 16, 8, 4, 2, 1)
"""Powers of two, and the sizes that full slots make."""
FEW = 16


def insert(
    conn: sqlite3.Connection,
    head: str,
    rows: Sequence[Sequence[Any]],
    tail: str = "",
    shared: Sequence[Any] = (),
) -> int:
    """`head` VALUES (…), (…) `tail`; returns how many rows were inserted or changed.

    `shared` are the values of the first columns, alike in all rows and handed over only once.
    """
    changed = 0
    for part in _parts(rows):
        bound, values = _bound(part)
        sql = _insert(head, tail, len(part), bound, len(shared))
        changed += conn.execute(sql, [*shared, *values]).rowcount
    return changed


def update(
    conn: sqlite3.Connection,
    statement: Callable[[str], str],
    rows: Sequence[Sequence[Any]],
    shared: Sequence[Any] = (),
) -> int:
    """An UPDATE built around `VALUES (…), (…)` (its FROM); returns how many rows changed.

    `shared` are its parameters `?1`, `?2`, …
    """
    changed = 0
    for part in _parts(rows):
        bound, values = _bound(part)
        sql = _update(statement, len(part), bound, len(shared))
        changed += conn.execute(sql, [*shared, *values]).rowcount
    return changed


def _bound(rows: Sequence[Sequence[Any]]) -> tuple[tuple[bool, ...], Iterable[Any]]:
    """Which columns are handed over, and their values.

    The driver asks of every None and every `bytes` whether somebody has an adapter for it, which
    takes longer than all the rest. A column of Nones is written as NULL; a `bytearray` is not asked
    about.
    """
    if len(rows) < FEW:  # few rows have too many forms: SQLite would have to compile each
        return (True,) * len(rows[0]), chain.from_iterable(rows)
    columns = [_handed_over(column) for column in zip(*rows, strict=True)]
    bound = tuple([column is not None for column in columns])
    kept = [column for column in columns if column is not None]
    return bound, chain.from_iterable(zip(*kept, strict=True))


def _handed_over(column: tuple[Any, ...]) -> Iterable[Any] | None:
    """A column as the driver likes it; None: there is nothing in it."""
    first = column[0]
    if first is None:
        first = next((value for value in column if value is not None), None)
        if first is None:
            return None
    if type(first) is not bytes:
        return column
    return [bytearray(value) if type(value) is bytes else value for value in column]


@functools.lru_cache(maxsize=256)
def _insert(head: str, tail: str, rows: int, bound: tuple[bool, ...], shared: int) -> str:
    same = "".join(f"?{n}," for n in range(1, shared + 1))
    return f"{head} VALUES {_marks(rows, bound, shared, same)} {tail}"


@functools.lru_cache(maxsize=256)
def _update(
    statement: Callable[[str], str], rows: int, bound: tuple[bool, ...], shared: int
) -> str:
    return statement(_marks(rows, bound, shared))


def _marks(rows: int, bound: Sequence[bool], shared: int, same: str = "") -> str:
    # Plain marks count on from the last number: SQLite looks up each written number in a list of
    # all that came before, and a statement of 200 rows has thousands.
    first = f"?{shared + 1}"
    row = ",".join("?" if is_bound else "NULL" for is_bound in bound)
    return ",".join([f"({same}{row.replace('?', first, 1)})", *[f"({same}{row})"] * (rows - 1)])


def _parts(rows: Sequence[Sequence[Any]]) -> list[Sequence[Sequence[Any]]]:
    parts: list[Sequence[Sequence[Any]]] = []
    at, left = 0, len(rows)
    for size in _SIZES:
        while left >= size:
            parts.append(rows[at : at + size])
            at += size
            left -= size
    return parts
