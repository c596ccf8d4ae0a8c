"""Whose fault an error is: the message's, which ends as a dead letter, or the database's, which is
waited out. A run that succeeded must not be lost to a bad disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg import errors

from ackbone.core.errors import (
    ConfigError,
    SchemaMismatch,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ackbone.pgserver.address import Address
from ackbone.pgserver.failures import translate as of_postgres
from ackbone.sqlitefile.faults import translate as of_sqlite
from ackbone.store.commit import commit_in_halves

WHERE = Address.from_url("postgresql://somebody@db.internal/agents")
FILE = Path("/somewhere/ackbone.db")


@pytest.mark.parametrize(
    "state",
    [
        "22001",  # too long
        "22003",  # a number out of range
        "22021",  # no text in this encoding
        "22P02",  # no number, no JSON
        "22P05",
        "23502",  # null where there must be something
        "23505",
        "54000",  # too large for an index
        "54001",  # nested too deeply
    ],
)
def test_what_postgresql_says_of_a_value_is_the_messages(state: str) -> None:
    assert of_postgres(errors.lookup(state)("no"), WHERE) is None


def test_what_the_driver_refuses_to_send_is_the_messages() -> None:
    assert (
        of_postgres(psycopg.DataError("text fields cannot contain NUL (0x00) bytes"), WHERE) is None
    )


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("58030", StoreUnavailable),  # input/output error
        ("58P01", StoreUnavailable),  # a file of a table is gone
        ("XX000", StoreUnavailable),
        ("XX001", StoreUnavailable),  # a damaged page
        ("XX002", StoreUnavailable),
        ("53000", StoreUnavailable),
        ("53100", StoreFull),
        ("53200", StoreFull),
        ("53400", StoreUnavailable),  # a limit of the configuration
        ("55000", StoreUnavailable),
        ("55006", StoreUnavailable),
        ("0A000", StoreUnavailable),  # a cached plan that does not fit any more
        ("26000", StoreUnavailable),  # a prepared statement that a proxy lost
        ("25006", StoreUnavailable),
        ("40P01", StoreUnavailable),
        ("57P01", StoreUnavailable),
        ("42501", StoreUnavailable),
        ("42804", StoreUnavailable),
        ("42P01", SchemaMismatch),
        ("P0001", StoreUnavailable),
        ("99999", StoreUnavailable),
    ],
)
def test_everything_else_that_postgresql_says_is_its_own(
    state: str, kind: type[StoreError]
) -> None:
    error: psycopg.Error = type("Newer", (psycopg.DatabaseError,), {"sqlstate": state})("no")
    with suppress(KeyError):
        error = errors.lookup(state)("no")
    assert type(of_postgres(error, WHERE)) is kind


def test_a_mistake_in_calling_the_driver_is_not_the_messages() -> None:
    found = of_postgres(psycopg.ProgrammingError("the query has 1 placeholder"), WHERE)
    assert type(found) is StoreUnavailable


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_IOERR, StoreUnavailable),
        (sqlite3.SQLITE_IOERR_FSYNC, StoreUnavailable),
        (sqlite3.SQLITE_IOERR_SHMSIZE, StoreFull),
        (sqlite3.SQLITE_BUSY, StoreUnavailable),
        (sqlite3.SQLITE_LOCKED, StoreUnavailable),
        (sqlite3.SQLITE_READONLY, StoreUnavailable),
        (sqlite3.SQLITE_CANTOPEN, StoreUnavailable),
        (sqlite3.SQLITE_PROTOCOL, StoreUnavailable),
    ],
)
def test_what_sqlite_says_of_its_file_is_the_stores(code: int, kind: type[StoreError]) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    assert type(of_sqlite(error, FILE)) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (sqlite3.OperationalError("database or disk is full"), StoreFull),
        (sqlite3.DatabaseError("database disk image is malformed"), StoreCorrupt),
        (sqlite3.DatabaseError("file is not a database"), StoreCorrupt),
        (sqlite3.InternalError("no"), StoreUnavailable),
        (sqlite3.InterfaceError("bad parameter or other API misuse"), StoreUnavailable),
        (sqlite3.ProgrammingError("Cannot operate on a closed database."), StoreUnavailable),
        (OSError(5, "Input/output error"), StoreUnavailable),
    ],
)
def test_so_is_what_has_no_code(error: Exception, kind: type[StoreError]) -> None:
    assert type(of_sqlite(error, FILE)) is kind


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", None, "not a number"])
def test_a_value_that_sqlite_does_not_take_is_the_messages(value: object) -> None:
    with closing(sqlite3.connect(":memory:")) as conn:
        conn.execute("CREATE TABLE t (n INTEGER NOT NULL PRIMARY KEY) WITHOUT ROWID, STRICT")
        with pytest.raises((sqlite3.Error, ValueError, OverflowError)) as caught:
            conn.execute("INSERT INTO t VALUES (?)", (value,))
    assert of_sqlite(caught.value, FILE) is caught.value


async def test_a_lack_of_memory_is_nobodys() -> None:
    async def commit(batch: Sequence[str]) -> Sequence[str]:
        raise MemoryError

    async def alone(item: str, error: Exception) -> str:
        raise AssertionError("it is not the item's")

    with pytest.raises(StoreUnavailable, match="memory"):
        await commit_in_halves(["a", "b"], commit, alone)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:SECRET/y@host/db",
        "postgresql://u:SECRET/SECRET@host:5432/db",
        "postgresql://u:1234SECRET/y@host/db",
        "postgresql://u:p@SECRET/y@host/db",
        "postgresql://u:5432/SECRET@host/db",
    ],
)
def test_a_password_that_is_not_escaped_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"write / as %2F") as refused:
        Address.from_url(url)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:a%2Fb%40c@host:5433/db", "PostgreSQL db on host:5433"),
        ("postgresql://one:5432,two:5433/db", "PostgreSQL db on one,two:5432,5433"),
        ("postgresql://u@[::1]:5432/a%40b", "PostgreSQL a@b on ::1:5432"),
        (
            "postgresql:///db?host=/run/postgresql&port=5433",
            "PostgreSQL db on /run/postgresql:5433",
        ),
    ],
)
def test_a_database_is_shown_without_its_password(url: str, shown: str) -> None:
    assert Address.from_url(url).shown == shown
