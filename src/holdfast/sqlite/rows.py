"""Statements over many rows.

One statement with many rows costs one hand-over of the interpreter lock; `executemany` costs one
per row, and a busy event loop makes each of those wait. Batches are cut into a few sizes, so that
SQLite compiles each form once.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

_SIZES = (200, 128, 100, 64, 32, 16, 8, 4, 2, 1)
"""Powers of two, and the sizes that full slots make."""


@functools.lru_cache(maxsize=512)
def _marks(rows: int, columns: int) -> str:
    return ",".join(["(" + ",".join("?" * columns) + ")"] * rows)


def insert(
    conn: sqlite3.Connection, head: str, rows: Sequence[Sequence[Any]], tail: str = ""
) -> int:
    """`head` VALUES (…), (…) `tail`; returns how many rows were inserted or changed."""
    changed = 0
    for part in _parts(rows):
        sql = f"{head} VALUES {_marks(len(part), len(part[0]))} {tail}"
        changed += conn.execute(sql, [value for row in part for value in row]).rowcount
    return changed


def update(
    conn: sqlite3.Connection, statement: Callable[[str], str], rows: Sequence[Sequence[Any]]
) -> int:
    """An UPDATE built around `VALUES (…), (…)` (its FROM); returns how many rows changed."""
    changed = 0
    for part in _parts(rows):
        sql = statement(_marks(len(part), len(part[0])))
        changed += conn.execute(sql, [value for row in part for value in row]).rowcount
    return changed


def _parts(rows: Sequence[Sequence[Any]]) -> list[Sequence[Sequence[Any]]]:
    parts: list[Sequence[Sequence[Any]]] = []
    at, left = 0, len(rows)
    for size in _SIZES:
        while left >= size:
            parts.append(rows[at : at + size])
            at += size
            left -= size
    return parts
