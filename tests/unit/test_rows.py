"""Statements over many rows write what one statement for each row writes."""

import sqlite3
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ackbone.sqlitefile import rows

COLUMNS = 5
ALIKE = (1, 3)

values = st.none() | st.integers(0, 2) | st.sampled_from(["", "a", "b"]) | st.binary(max_size=3)


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Rows whose columns hold one value, or Nones, or a mix."""
    size = draw(st.integers(1, 230))
    columns = []
    for _ in range(COLUMNS):
        few = draw(st.lists(values, min_size=1, max_size=3))
        rest = few[0] if draw(st.booleans()) else None
        columns.append([*few, *[rest] * size][:size])
    return list(zip(*columns, strict=True))


def stored(conn: sqlite3.Connection) -> list[Any]:
    return conn.execute("SELECT s, t, a, b, c, d, e FROM x ORDER BY rowid").fetchall()


@given(tables())
def test_insert(table: list[tuple[Any, ...]]) -> None:
    conn = sqlite3.connect(":memory:")
    conn.execute("CREATE TABLE x (s, t, a, b, c, d, e)")
    head = "INSERT INTO x (s, t, a, b, c, d, e)"
    assert rows.insert(conn, head, table, shared=("s", 7), alike=ALIKE) == len(table)
    assert stored(conn) == [("s", 7, *row) for row in table]


@given(tables())
def test_insert_columns(table: list[tuple[Any, ...]]) -> None:
    conn = sqlite3.connect(":memory:")
    conn.execute("CREATE TABLE x (s, t, a, b, c, d, e)")
    head = "INSERT INTO x (s, t, a, b, c, d, e)"
    columns = list(zip(*table, strict=True))
    assert rows.insert_columns(conn, head, columns, shared=("s", 7), alike=ALIKE) == len(table)
    assert stored(conn) == [("s", 7, *row) for row in table]


def _statement(marks: str) -> str:
    return (
        "UPDATE x SET s = ?1, a = u.column1, b = u.column2, c = u.column3, d = u.column4,"
        f" e = u.column5 FROM (VALUES {marks}) u WHERE x.rowid = u.column6"
    )


@given(tables())
def test_update(table: list[tuple[Any, ...]]) -> None:
    conn = sqlite3.connect(":memory:")
    conn.execute("CREATE TABLE x (s, t, a, b, c, d, e)")
    conn.executemany("INSERT INTO x (t) VALUES (?)", [(n,) for n in range(len(table))])
    numbered = [(*row, n) for n, row in enumerate(table, 1)]
    assert rows.update(conn, _statement, numbered, shared=("s",), alike=ALIKE) == len(table)
    assert stored(conn) == [("s", n, *row) for n, row in enumerate(table)]


def test_what_is_alike_in_all_rows_is_handed_over_once() -> None:
    table = [(n, "same", None, "too") for n in range(200)]
    form, once, each = rows._bound(table, (1, 3))
    assert once == ["same", "too"]
    assert list(each) == list(range(200))
    assert rows._marks(2, form, 1, ["?1"]) == "(?1,?4,?2,NULL,?3),(?1,?,?2,NULL,?3)"
    table[7] = (7, "another", None, "too")
    assert rows._bound(table, (1, 3))[1] == []
