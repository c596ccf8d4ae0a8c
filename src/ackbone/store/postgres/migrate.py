"""The schema of a PostgreSQL database: which revision it has, and how it comes to the newest one.

An upgrade is one transaction under an advisory lock: a process that is killed on the way leaves the
old schema or the new one, and of several that start together one works while the others wait.

An empty database gets its tables at the first start. One with an older revision is upgraded only by
`ackbone migrate`: workers of two versions may share it, and a person decides when that ends.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import errors

from ackbone.core.errors import SchemaMismatch, StoreError, StoreUnavailable
from ackbone.pgserver.address import Address
from ackbone.pgserver.failures import translate
from ackbone.store.revisions import HEAD, is_older, run_migrations, upgrade_needed

from .partitions import make_partitions
from .tenant_wall import (
    Admission,
    admit_api,
    admit_worker,
    close_partitions,
    extend_pass,
    require_sight,
)

log = logging.getLogger("ackbone.store")

LOCK = 7_310_579_635_104_522
"""Advisory lock of everybody who changes the schema."""
_OURS = "queue_executions"


def current_revision(url: str) -> str | None:
    """The revision that the database says it has; None if it has none."""
    with _connected(url) as (conn, _):
        return _revision(conn)


def is_behind(url: str) -> bool:
    """Return whether `upgrade` has something to do. Raises SchemaMismatch if it could not help."""
    return _is_behind(current_revision(url), Address.from_url(url))


def ensure_schema(url: str) -> bool:
    """Make the tables in an empty database. True if there was anything to do.

    Raises SchemaMismatch, which names the command, if the tables are there and are older, and
    StoreUnavailable if this role would not see all their rows.
    """
    revision = current_revision(url)
    if revision is None:
        return upgrade(url)
    require_current(url)
    return False


def require_current(url: str) -> None:
    """Raises SchemaMismatch or StoreUnavailable unless tables of `HEAD` are there to work with."""
    with _connected(url) as (conn, address):
        revision = _revision(conn)
        if _is_behind(revision, address):
            raise upgrade_needed(address.shown, revision)
        require_sight(conn, address)


def upgrade(url: str, *, wait_s: float = 60.0) -> bool:
    """Bring the database to `HEAD`, whole or not at all. True if there was anything to do."""
    with _connected(url) as (conn, address):
        if not _is_behind(_revision(conn), address):
            return False
        _lock(conn, address, wait_s)  # held until this connection ends
        revision = _revision(conn)
        if not _is_behind(revision, address):  # another process was faster
            return False
        if revision is None:
            _refuse_foreign(conn, address)

        def finish() -> None:
            make_partitions(conn)
            extend_pass(conn)

        run_migrations("postgresql+psycopg://", conn, then=finish)
        did = "made the tables" if revision is None else f"upgraded the tables from {revision}"
        log.info("%s: %s (schema revision %s)", address.shown, did, HEAD)
        return True


def tend(url: str) -> int:
    """Do what only the owner of the tables can: make partitions for the months ahead, close them to
    other roles, and give all workers all tables. Returns how many partitions were made."""
    with _connected(url) as (conn, _):
        while True:
            try:
                with conn.transaction():
                    conn.execute("SET LOCAL lock_timeout = '10s'")
                    made = make_partitions(conn)
                    close_partitions(conn)
                    extend_pass(conn)
                return made
            except errors.DuplicateTable:
                continue  # a worker made one just now


def admit(url: str, *, worker: str | None = None, api: str | None = None) -> list[Admission]:
    """Give roles their rights, all of them or none: see `wall`."""
    with _connected(url) as (conn, address), conn.transaction():
        found = [] if worker is None else [admit_worker(conn, address, worker)]
        return found if api is None else [*found, admit_api(conn, address, api)]


@contextlib.contextmanager
def _connected(url: str) -> Iterator[tuple[psycopg.Connection[Any], Address]]:
    address = Address.from_url(url)
    try:
        with psycopg.connect(address, autocommit=True) as conn:
            yield conn, address
    except psycopg.Error as error:
        raise _translated(error, address) from error


def _translated(error: psycopg.Error, address: Address) -> StoreError:
    if isinstance(error, errors.InsufficientPrivilege):
        return StoreUnavailable(
            f"{address.shown}: this role may not make or read the tables "
            f"({str(error).splitlines()[0]}). Run 'ackbone migrate' with a role that owns the "
            "schema (--worker-role NAME lets another one work), then start again"
        )
    return translate(error, address) or StoreUnavailable(f"{address.shown}: {error}")


def _revision(conn: psycopg.Connection[Any]) -> str | None:
    try:
        rows = conn.execute("SELECT version_num FROM alembic_version ORDER BY 1").fetchall()
    except errors.UndefinedTable:
        return None
    return "+".join(str(row[0]) for row in rows) or None


def _is_behind(revision: str | None, address: Address) -> bool:
    return is_older(revision, address.shown, "database")


def _refuse_foreign(conn: psycopg.Connection[Any], address: Address) -> None:
    """Raises SchemaMismatch if another program made a table of our name."""
    if conn.execute("SELECT to_regclass(%s)", (_OURS,)).fetchone() != (None,):
        raise SchemaMismatch(
            f"{address.shown} holds a table {_OURS} and no schema revision (expected: {HEAD}). "
            "Give ackbone a database or a schema of its own. Nothing was changed."
        )


def _lock(conn: psycopg.Connection[Any], address: Address, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while conn.execute("SELECT pg_try_advisory_lock(%s)", (LOCK,)).fetchone() != (True,):
        if time.monotonic() >= deadline:
            raise StoreUnavailable(
                f"another process has been upgrading the schema of {address.shown} for "
                f"{wait_s:g} s. Wait for it, or end it: stopping it does no harm."
            )
        time.sleep(0.05)
