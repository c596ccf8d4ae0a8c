"""The schema of a SQLite file: which revision it has, and how it comes to the newest one.

Every start of the program asks `ensure_schema`, so the usual answer ("it is up to date") needs
nothing but `sqlite3`: Alembic and SQLAlchemy take longer to import than a start may take. A new
file gets its tables from `spine.sql`, the statements that the migrations emit, for the same reason;
only an older file is upgraded by Alembic itself. All of it happens in one transaction: whoever is
killed on the way leaves the old schema or the new one.

`python -m ackbone.store.migrate` writes `spine.sql` anew after a revision was added.

Exceptions to "every business table has a UUID primary key", on purpose:
1. `idempotency_keys`: its key is the business key itself, (tenant_id, key, subscription): dedup
   keys come from the messages, and a second encoding would only hide them.
2. `queue_executions`: (tenant_id, message_id, subscription) is the identity of a task; `id` is the
   UUIDv7 of its row and has no index of its own.
3. `event_log`: append-only, partitioned by time where the database can, so it has no unique index.
4. `alembic_version` belongs to Alembic.
`effects`, `quotas`, `sources`, `roles`, `workers`, `send_windows` and `messages` are the engine's
own machinery.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ackbone.core.errors import SchemaMismatch, StoreUnavailable
from ackbone.sqlite.faults import refuse_network, translate
from ackbone.sqlite.holders import who_upgrades
from ackbone.sqlite.turnstile import Turnstile

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0007"
"""The revision that this program reads and writes."""

PAGE_SIZE = 8192
SPINE = Path(__file__).with_name("spine.sql")
MIGRATIONS = Path(__file__).with_name("migrations")

alembic_lock = threading.Lock()  # Alembic keeps its context in module globals


def current_revision(path: Path) -> str | None:
    """The revision that the file says it has; None if it has none, or if there is no file."""
    if not path.exists():
        return None
    try:
        # Read-only: a look must neither make a file nor copy the log into it when it closes.
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30)) as conn:
            if "alembic_version" not in _tables(conn):
                return None
            rows = conn.execute("SELECT version_num FROM alembic_version ORDER BY 1").fetchall()
    except sqlite3.Error as error:
        raise translate(error, path) from error
    return "+".join(str(row[0]) for row in rows) or None


def is_behind(path: Path) -> bool:
    """Does `ensure_schema` have something to do? Raises SchemaMismatch if it could not help: a
    newer version or another program made the file."""
    revision = current_revision(path)
    if revision == HEAD:
        return False
    if revision is None or revision in known_revisions():
        return True
    raise refuse_revision(revision, str(path), "file")


def refuse_revision(revision: str, place: str, kind: str) -> SchemaMismatch:
    """The error for a revision that is none of ours, or one of a later version."""
    if revision.isdigit() and revision > HEAD:
        return SchemaMismatch(
            f"{place} has schema revision {revision}; this ackbone knows revisions up to {HEAD}. "
            f"A newer ackbone has used this {kind}. Install that version (pip install --upgrade "
            "ackbone), or restore the copy made before it was upgraded. Nothing was changed."
        )
    return SchemaMismatch(
        f"{place} has schema revision {revision!r}, which is none of ackbone's (this one has "
        f"{HEAD}): it belongs to another program. Give ackbone a {kind} of its own. "
        "Nothing was changed."
    )


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


def render(dialect: str, revision: str = "head") -> str:
    """The statements that lead from nothing to `revision`, as Alembic emits them."""
    from alembic import command

    buffer = io.StringIO()
    with alembic_lock:
        command.upgrade(alembic_config(buffer, dialect=dialect), revision, sql=True)
    # Which SQLite the machine has decides whether the last INSERT returns its row: it need not.
    text = buffer.getvalue().replace(" RETURNING version_num;", ";")
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def render_spine() -> str:
    """What `spine.sql` has to hold."""
    return (
        "-- Made by `python -m ackbone.store.migrate` from migrations/versions; not edited.\n"
        "-- Run inside one transaction by ensure_schema, for a new SQLite file.\n"
        + render("sqlite")
    )


def known_revisions() -> set[str]:
    """Every revision that this program has a migration for."""
    return {file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("*_*.py")}


def _tables(conn: sqlite3.Connection) -> list[str]:
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
        tables = _tables(conn)
        if tables and current_revision(path) is None:
            raise SchemaMismatch(
                f"{path} holds tables that are not ackbone's ({', '.join(tables[:5])}) and no "
                f"schema revision (expected: {HEAD}). Give ackbone a file of its own. "
                "Nothing was changed."
            )
        _prepare(conn, path, wait_s)
        with turnstile.within(wait_s):
            if not tables:
                _run_spine(conn)
            if current_revision(path) != HEAD:
                _run_alembic(conn)


def _prepare(conn: sqlite3.Connection, path: Path, wait_s: float) -> None:
    """What has to be said before the first table is made (auto_vacuum stays NONE)."""
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


def _run_spine(conn: sqlite3.Connection) -> None:
    try:
        conn.executescript(f"BEGIN IMMEDIATE;\n{SPINE.read_text(encoding='utf-8')}\nCOMMIT;")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def _run_alembic(conn: sqlite3.Connection) -> None:
    from alembic import command
    from sqlalchemy import create_engine, event
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool

    # The driver's own notion of transactions commits before DDL; ours is said in so many words.
    engine = create_engine("sqlite://", creator=lambda: conn, poolclass=NullPool)
    event.listen(engine, "begin", lambda it: it.exec_driver_sql("BEGIN IMMEDIATE"))
    try:
        with alembic_lock, engine.begin() as connection:
            command.upgrade(alembic_config(io.StringIO(), connection=connection), "head")
    except DBAPIError as error:
        raise error.orig or error from error


def alembic_config(output: io.StringIO, **attributes: Any) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output, attributes=attributes)
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


if __name__ == "__main__":
    SPINE.write_text(render_spine(), encoding="utf-8")
