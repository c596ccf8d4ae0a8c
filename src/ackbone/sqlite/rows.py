"""Statements over many rows.

One statement with many rows costs one hand-over of the interpreter lock; `executemany` costs one
per row, and a busy event loop makes each of those wait. Batches are cut into a few sizes, so that
SQLite compiles each form once.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import Any

_SIZES = (1000, 500, 200, 128, 100, 64, 32, 16, 8, 4, 2, 1)
"""Powers of two, and the sizes that full slots make. Each statement ends with a wait for the
interpreter's lock while the loop is at work: few large ones wait less often."""
FEW = 16


def insert(
    conn: sqlite3.Connection,
    head: str,
    rows: Sequence[Sequence[Any]],
    tail: str = "",
    shared: Sequence[Any] = (),
    alike: Sequence[int] = (),
) -> int:
    """`head` VALUES (…), (…) `tail`; returns how many rows were inserted or changed.

    `shared` are the values of the first columns, alike in all rows and handed over only once.
    `alike` are places in `rows` that mostly, but not always, hold the same in all of them.
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
    """`insert` for whoever has the values column by column: no row need be put together first."""
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
    """An UPDATE built around `VALUES (…), (…)` (its FROM); returns how many rows changed.

    `shared` are its parameters `?1`, `?2`, …; `alike` as in `insert`.
    """
    changed = 0
    for part in _parts(rows):
        form, once, values = _bound(part, alike)
        sql = _update(statement, len(part), form, len(shared))
        changed += conn.execute(sql, [*shared, *once, *values]).rowcount
    return changed


_EACH, _ONCE, _NULL = "?", "once", "NULL"
_Form = tuple[str, ...]
"""How the values of each column get into a statement."""


def _bound(
    rows: Sequence[Sequence[Any]], alike: Sequence[int]
) -> tuple[_Form, list[Any], Iterable[Any]]:
    """The form of a row, the values that are handed over once, and those of each row.

    The driver asks of every None and every `bytes` whether somebody has an adapter for it, which
    takes longer than all the rest. A column of Nones is written as NULL; a `bytearray` is not asked
    about. What is `alike` goes over once, or not at all: some of it would be too many forms.
    """
    if len(rows) < FEW:
        return (_EACH,) * len(rows[0]), [], chain.from_iterable(rows)
    return _bound_columns(list(zip(*rows, strict=True)), alike)


def _bound_columns(
    columns: Sequence[Sequence[Any]], alike: Sequence[int]
) -> tuple[_Form, list[Any], Iterable[Any]]:
    if len(columns[0]) < FEW:  # few rows have too many forms: SQLite would have to compile each
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
    """A column as the driver likes it."""
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
    # Plain marks count on from the last number: SQLite looks up each written number in a list of
    # all that came before, and a statement of 200 rows has thousands.
    first = [*row]
    if _EACH in first:
        first[first.index(_EACH)] = f"?{next(numbers)}"
    rest = f"({','.join([*same, *row])})"
    return ",".join([f"({','.join([*same, *first])})", *[rest] * (rows - 1)])


def _parts(rows: Sequence[Sequence[Any]]) -> list[Sequence[Sequence[Any]]]:
    return [rows[at : at + size] for at, size in _cuts(len(rows))]


def _cuts(count: int) -> list[tuple[int, int]]:
    """Where each part of so many rows begins, and its size."""
    cuts: list[tuple[int, int]] = []
    at = 0
    for size in _SIZES:
        while count - at >= size:
            cuts.append((at, size))
            at += size
    return cuts
