"""Statements over many rows.

One statement with many rows costs one hand-over of the interpreter lock; `executemany` costs one
per row, and a busy event loop makes each of those wait. Batches are cut into a few sizes, so that
SQLite compiles each form once.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

_SIZES = (200, 128, 100, 64, 32, 16, 8, 4, 2, 1)
"""Powers of two, and the sizes that full slots make."""


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
        sql = _insert(head, tail, len(part), len(part[0]), len(shared))
        changed += conn.execute(sql, [*shared, *chain.from_iterable(part)]).rowcount
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
        sql = _update(statement, len(part), len(part[0]), len(shared))
        changed += conn.execute(sql, [*shared, *chain.from_iterable(part)]).rowcount
    return changed


@functools.lru_cache(maxsize=256)
def _insert(head: str, tail: str, rows: int, columns: int, shared: int) -> str:
    same = "".join(f"?{n}," for n in range(1, shared + 1))
    return f"{head} VALUES {_marks(rows, columns, shared, same)} {tail}"


@functools.lru_cache(maxsize=256)
def _update(statement: Callable[[str], str], rows: int, columns: int, shared: int) -> str:
    return statement(_marks(rows, columns, shared))


def _marks(rows: int, columns: int, shared: int, same: str = "") -> str:
    numbers = range(shared + 1, shared + 1 + rows * columns)
    marks = [f"?{n}" for n in numbers]
    each = (marks[at : at + columns] for at in range(0, len(marks), columns))
    return ",".join(f"({same}{','.join(row)})" for row in each)


def _parts(rows: Sequence[Sequence[Any]]) -> list[Sequence[Sequence[Any]]]:
    parts: list[Sequence[Sequence[Any]]] = []
    at, left = 0, len(rows)
    for size in _SIZES:
        while left >= size:
            parts.append(rows[at : at + size])
            at += size
            left -= size
    return parts
