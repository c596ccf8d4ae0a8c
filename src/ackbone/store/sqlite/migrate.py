"""The schema of a SQLite file: which revision it has, and how it comes to the newest one.

Every start of the program asks `ensure_schema`, so the usual answer ("it is up to date") needs
nothing but `sqlite3`: Alembic and SQLAlchemy take longer to import than a start may take. A new
file gets its tables from the statements of the first revision, for the same reason; only an older
file is upgraded by Alembic itself. All of it happens in one transaction: a process that is killed
on the way leaves the old schema or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from ackbone.core.errors import SchemaMismatch, StoreUnavailable
from ackbone.sqlitefile.faults import refuse_network, translate
from ackbone.sqlitefile.sharing import Turnstile, who_upgrades
from ackbone.store.revisions import (
    FIRST,
    HEAD,
    is_older,
    run_migrations,
    statements,
    upgrade_needed,
)

PAGE_SIZE = 8192
VERSION = (
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL,"
    " CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))",
    f"INSERT INTO alembic_version (version_num) VALUES ('{FIRST}')",
)


def current_revision(path: Path) -> str | None:
    """The revision that the file says it has; None if it has none, or if there is no file."""
    if not path.exists():
        return None
    try:
        # Read-only: a look must neither make a file nor copy the log into it when it closes.
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30)) as conn:
            if "alembic_version" not in tables_of(conn):
                return None
            rows = conn.execute("SELECT version_num FROM alembic_version ORDER BY 1").fetchall()
    except sqlite3.Error as error:
        raise translate(error, path) from error
    return "+".join(str(row[0]) for row in rows) or None


def is_behind(path: Path) -> bool:
    """Return whether `ensure_schema` has something to do. Raises SchemaMismatch if it could not
    help."""
    return is_older(current_revision(path), str(path), "file")


def require_current(path: Path) -> None:
    """Raises SchemaMismatch unless the file has tables of `HEAD`."""
    if is_behind(path):
        raise upgrade_needed(str(path), current_revision(path))


def ensure_schema(path: Path, *, wait_s: float = 60.0) -> bool:
    """Bring the file to `HEAD`, making it if need be. True if there was anything to do.

    Any number of processes may call this at once: one works, the others wait, up to `wait_s`.
    """
    path = path.resolve()
    if not is_behind(path):
        return False
    refuse_network(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(Path(f"{path}.migrate.lock"), wait_s):
            if not is_behind(path):  # another process was faster
                return False
            _migrate(path, wait_s)
    except (sqlite3.Error, OSError) as error:
        raise translate(error, path) from error
    return True


def tables_of(conn: sqlite3.Connection) -> list[str]:
    """The names of all tables but SQLite's own."""
    rows = conn.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%'"
        " ESCAPE '\\' ORDER BY name"
    )
    return [str(row[0]) for row in rows]


@contextlib.contextmanager
def _locked(lock: Path, wait_s: float) -> Iterator[None]:
    # The file stays: removing it would let two processes hold two different locks.
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreUnavailable(
                        f"{who_upgrades(lock) or 'another process'} has been upgrading the schema "
                        f"for {wait_s:g} s (it holds {lock}). Wait for it, or end it: stopping it "
                        "does no harm."
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _migrate(path: Path, wait_s: float) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with (
        contextlib.closing(Turnstile(path)) as turnstile,
        contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=wait_s)) as conn,
    ):
        tables = tables_of(conn)
        if tables and current_revision(path) is None:
            raise SchemaMismatch(
                f"{path} holds tables that are not ackbone's ({', '.join(tables[:5])}) and no "
                f"schema revision (expected: {HEAD}). Give ackbone a file of its own. "
                "Nothing was changed."
            )
        _prepare(conn, path, wait_s)
        with turnstile.within(wait_s):
            if not tables:
                make_tables(conn)
            if is_behind(path):
                run_migrations("sqlite://", conn, begin="BEGIN IMMEDIATE")


def _prepare(conn: sqlite3.Connection, path: Path, wait_s: float) -> None:
    """Settings that must be made before the first table (auto_vacuum stays NONE)."""
    conn.execute(f"PRAGMA page_size={PAGE_SIZE}")
    conn.execute("PRAGMA synchronous=FULL")
    deadline = time.monotonic() + wait_s
    mode = ""
    while mode != "wal":
        # The change of mode needs the file alone and does not wait for it by itself: another
        # process may be looking for the revision at this moment.
        try:
            mode = conn.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
        if mode != "wal":
            if time.monotonic() >= deadline:
                raise StoreUnavailable(
                    f"{path} cannot be switched to write-ahead logging: another program keeps it "
                    "open, or its file system has no shared memory. Use a local disk."
                )
            time.sleep(0.02)
    conn.execute("PRAGMA wal_autocheckpoint=0")


def make_tables(conn: sqlite3.Connection) -> None:
    """Make the tables of the first revision, as Alembic would."""
    script = ";\n".join(["BEGIN IMMEDIATE", *statements("sqlite"), *VERSION, "COMMIT;"])
    try:
        conn.executescript(script)
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise
