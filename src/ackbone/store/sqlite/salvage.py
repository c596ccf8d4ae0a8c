"""Copies the readable rows of a damaged database into a new one.

SQLite stops at the first page that it cannot read. Rows are therefore searched by rowid: a search
reads only the pages on its path, so rows after a damaged page can still be found. Indexes that can
be read show how many rows were lost.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .migrate import tables_of

CHUNK = 200
LAST_ROWID = (1 << 63) - 1
NUMBERS_LEFT_OUT = 1000
"""Worker ids to skip if it is unknown which were used: none may be used twice."""
_NOT_COPIED = frozenset({"alembic_version", "witness"})


class Saved(NamedTuple):
    """The result for one table."""

    table: str
    saved: int
    lost: int


def salvage(source: Path, target: Path) -> list[Saved]:
    """Copy every readable row of `source` into `target`, which has the same tables without rows."""
    with (
        contextlib.closing(_reading(source)) as old,
        contextlib.closing(sqlite3.connect(target, isolation_level=None)) as new,
    ):
        old.text_factory = lambda data: data.decode("utf-8", "replace")
        readable = tables_of(old)  # raises if not even the list of tables can be read
        new.execute("BEGIN IMMEDIATE")
        found = [
            _table(old, new, name)
            for name in tables_of(new)
            if name in readable and name not in _NOT_COPIED
        ]
        _never_use_a_number_twice(old, new)
        new.execute("COMMIT")
    return found


def _reading(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)


def _table(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> Saved:
    theirs = _columns(old, table)
    columns = [name for name in _columns(new, table) if name in theirs]
    if not columns:
        return Saved(table, 0, 0)
    names = ", ".join(f'"{name}"' for name in columns)
    marks = ", ".join("?" * (len(columns) + 1))
    insert = f"INSERT OR IGNORE INTO {table} (rowid, {names}) VALUES ({marks})"
    select = f"SELECT rowid, {names} FROM {table} NOT INDEXED"
    kept: set[int] = set()
    refused: set[int] = set()

    def keep(row: tuple[Any, ...]) -> None:
        taken = new.execute(insert, row).rowcount == 1
        (kept if taken else refused).add(row[0])

    for row in _rows(old, select):
        keep(row)
    known = _rowids_by_index(old, table)
    for rowid in sorted(known - kept - refused):  # skipped between two damaged pages
        for row in _ask(old, f"{select} WHERE rowid = ?", rowid) or ():
            keep(row)
    return Saved(table, len(kept), len((known | refused) - kept))


def _columns(conn: sqlite3.Connection, table: str) -> list[str]:
    with contextlib.suppress(sqlite3.DatabaseError):
        return [str(row[1]) for row in conn.execute(f"PRAGMA table_info({table})")]
    return []


def _rows(conn: sqlite3.Connection, select: str) -> Iterator[tuple[Any, ...]]:
    """Yield the readable rows by rowid. Rowids begin at 1."""
    at = 1
    while True:
        found = _ask(conn, f"{select} WHERE rowid >= ? ORDER BY rowid LIMIT {CHUNK}", at)
        if found is None:
            found = _ask(conn, f"{select} WHERE rowid >= ? ORDER BY rowid LIMIT 1", at)
        if found is None:
            after = _behind_the_damage(conn, select, at)
            if after is None:
                return
            at = after
            continue
        yield from found
        if not found or found[-1][0] >= LAST_ROWID:
            return
        at = found[-1][0] + 1


def _behind_the_damage(conn: sqlite3.Connection, select: str, at: int) -> int | None:
    """Return the next rowid from which rows can be read again, or None."""

    def readable(rowid: int) -> bool:
        return _ask(conn, f"{select} WHERE rowid >= ? ORDER BY rowid LIMIT 1", rowid) is not None

    step = 1
    while not readable(min(at + step, LAST_ROWID)):
        if at + step >= LAST_ROWID:
            return None
        step *= 2
    low, high = at + step // 2, min(at + step, LAST_ROWID)
    while low < high:
        middle = (low + high) // 2
        if readable(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _ask(conn: sqlite3.Connection, sql: str, rowid: int) -> list[tuple[Any, ...]] | None:
    """Run a query. None: a page on its path cannot be read."""
    try:
        return conn.execute(sql, (rowid,)).fetchall()
    except sqlite3.DatabaseError:
        return None


def _rowids_by_index(conn: sqlite3.Connection, table: str) -> set[int]:
    """Return the rowids that the table had, as far as its indexes can be read."""
    found: set[int] = set()
    with contextlib.suppress(sqlite3.DatabaseError):
        indexes = conn.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ?", (table,)
        ).fetchall()
        for name, sql in indexes:
            # SQLite uses a partial index only for a query that repeats its condition.
            _, _, condition = str(sql or "").partition(" WHERE ")
            where = f" WHERE {condition}" if condition else ""
            with contextlib.suppress(sqlite3.DatabaseError):
                rows = conn.execute(f'SELECT rowid FROM {table} INDEXED BY "{name}"{where}')
                found.update(rowid for (rowid,) in rows)
    return found


def _never_use_a_number_twice(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """Keep the counters, so that no number is used twice, also not those of lost rows."""
    for table, column in (("workers", "worker_id"), ("messages", "seq")):
        last = None
        with contextlib.suppress(sqlite3.DatabaseError):
            last = old.execute(
                "SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)
            ).fetchone()
        if last is None:
            seen = f"SELECT max({column}) FROM {table}"
            if table == "workers":
                seen = f"SELECT max((SELECT max(worker_id) FROM event_log), ({seen}))"
            last = ((new.execute(seen).fetchone()[0] or 0) + NUMBERS_LEFT_OUT,)
        new.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
        new.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, last[0]))
