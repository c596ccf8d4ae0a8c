"""Statements over many rows.

One statement with many rows hands over the interpreter lock once. `executemany` hands it over once
per row, and a busy event loop makes it wait each time. Batches are cut into a few sizes, so that
SQLite compiles each statement once.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import Any

_SIZES = (1000, 500, 200, 128, 100, 64, 32, 16, 8, 4, 2, 1)
"""Powers of two, and the batch sizes of full slots. After each statement the thread waits for the
interpreter lock while the loop is busy, so few large statements are faster."""
FEW = 16


def insert(
    conn: sqlite3.Connection,
    head: str,
    rows: Sequence[Sequence[Any]],
    tail: str = "",
    shared: Sequence[Any] = (),
    alike: Sequence[int] = (),
) -> int:
    """Run `head` VALUES (…), (…) `tail`. Returns how many rows were inserted or changed.

    `shared`: values of the first columns, equal in all rows and bound only once. `alike`: positions
    in `rows` whose values are usually, but not always, equal in all rows.
    """
    changed = 0
    for part in _parts(rows):
        form, once, values = _bound(part, alike)
        sql = _insert(head, tail, len(part), form, len(shared))
        changed += conn.execute(sql, [*shared, *once, *values]).rowcount
    return changed


def insert_columns(
    conn: sqlite3.Connection,
    head: str,
    columns: Sequence[Sequence[Any]],
    shared: Sequence[Any] = (),
    alike: Sequence[int] = (),
) -> int:
    """As `insert`, for values that are given column by column, without building rows first."""
    changed = 0
    for at, size in _cuts(len(columns[0])):
        part = [column[at : at + size] for column in columns]
        form, once, values = _bound_columns(part, alike)
        sql = _insert(head, "", size, form, len(shared))
        changed += conn.execute(sql, [*shared, *once, *values]).rowcount
    return changed


def update(
    conn: sqlite3.Connection,
    statement: Callable[[str], str],
    rows: Sequence[Sequence[Any]],
    shared: Sequence[Any] = (),
    alike: Sequence[int] = (),
) -> int:
    """Run an UPDATE whose FROM is `VALUES (…), (…)`. Returns how many rows changed.

    `shared`: its parameters `?1`, `?2`, …; `alike`: as in `insert`.
    """
    changed = 0
    for part in _parts(rows):
        form, once, values = _bound(part, alike)
        sql = _update(statement, len(part), form, len(shared))
        changed += conn.execute(sql, [*shared, *once, *values]).rowcount
    return changed


_EACH, _ONCE, _NULL = "?", "once", "NULL"
_Form = tuple[str, ...]
"""How a statement gets the values of each column."""


def _bound(
    rows: Sequence[Sequence[Any]], alike: Sequence[int]
) -> tuple[_Form, list[Any], Iterable[Any]]:
    """Return the form of a row, the values that are bound once, and those of each row.

    The driver looks up an adapter for every None and every `bytes`, which takes longer than all the
    rest. So a column of Nones is written as NULL, and bytes are bound as `bytearray`, which has no
    lookup. `alike` columns are bound once if all of them are equal, otherwise none is: single
    columns would make too many forms of the statement.
    """
    if len(rows) < FEW:
        return (_EACH,) * len(rows[0]), [], chain.from_iterable(rows)
    return _bound_columns(list(zip(*rows, strict=True)), alike)


def _bound_columns(
    columns: Sequence[Sequence[Any]], alike: Sequence[int]
) -> tuple[_Form, list[Any], Iterable[Any]]:
    if (
        len(columns[0]) < FEW
    ):  # small batches would have too many forms, and SQLite would compile each
        return (_EACH,) * len(columns), [], chain.from_iterable(zip(*columns, strict=True))
    if not all(_is_one(columns[place]) for place in alike):
        alike = ()
    form: list[str] = []
    once: list[Any] = []
    each: list[Iterable[Any]] = []
    for place, column in enumerate(columns):
        if column[0] is None and _is_one(column):
            form.append(_NULL)
        elif place in alike:
            form.append(_ONCE)
            once.append(column[0])
        else:
            form.append(_EACH)
            each.append(_handed_over(column))
    return tuple(form), once, chain.from_iterable(zip(*each, strict=True))


def _is_one(column: Sequence[Any]) -> bool:
    return column.count(column[0]) == len(column)


def _handed_over(column: Sequence[Any]) -> Iterable[Any]:
    """Convert a column to values that the driver binds fast."""
    first = column[0]
    if first is None:
        first = next(value for value in column if value is not None)
    if type(first) is not bytes:
        return column
    if set(map(type, column)) == {bytes}:
        return map(bytearray, column)
    return [bytearray(value) if type(value) is bytes else value for value in column]


@functools.lru_cache(maxsize=256)
def _insert(head: str, tail: str, rows: int, form: _Form, shared: int) -> str:
    same = [f"?{n}" for n in range(1, shared + 1)]
    return f"{head} VALUES {_marks(rows, form, shared, same)} {tail}"


@functools.lru_cache(maxsize=256)
def _update(statement: Callable[[str], str], rows: int, form: _Form, shared: int) -> str:
    return statement(_marks(rows, form, shared, []))


def _marks(rows: int, form: _Form, shared: int, same: list[str]) -> str:
    numbers = count(shared + 1)
    row = [f"?{next(numbers)}" if mark is _ONCE else mark for mark in form]
    # Plain marks continue from the last number. SQLite would look up each written number in a list
    # of all earlier ones, and a statement with 200 rows has thousands.
    first = [*row]
    if _EACH in first:
        first[first.index(_EACH)] = f"?{next(numbers)}"
    rest = f"({','.join([*same, *row])})"
    return ",".join([f"({','.join([*same, *first])})", *[rest] * (rows - 1)])


def _parts(rows: Sequence[Sequence[Any]]) -> list[Sequence[Sequence[Any]]]:
    return [rows[at : at + size] for at, size in _cuts(len(rows))]


def _cuts(count: int) -> list[tuple[int, int]]:
    """Yield the start and the size of each part of `count` rows."""
    cuts: list[tuple[int, int]] = []
    at = 0
    for size in _SIZES:
        while count - at >= size:
            cuts.append((at, size))
            at += size
    return cuts
