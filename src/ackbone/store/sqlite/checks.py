"""Checks of `ackbone doctor` on a SQLite file. Nothing here writes, or needs the write lock."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from ackbone.core.errors import StoreError
from ackbone.core.findings import Check, ok, refused, warning
from ackbone.sqlitefile.faults import refuse_network, translate
from ackbone.sqlitefile.sharing import who_writes, why_no_turn
from ackbone.sqlitefile.wal import long_log, witnessed
from ackbone.store import checks
from ackbone.store.revisions import HEAD

from .migrate import current_revision, is_behind

OLDEST = (3, 35, 0)
"""The first version with RETURNING and UPDATE … FROM."""
WAL_RESET_FIXED = (3, 51, 3)
"""The first version in which a checkpoint that meets a write cannot lose commits."""
_BODIES = ("messages", "queue_executions", "dead_letters", "outbox")


def check_version(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> Check:
    text = ".".join(str(part) for part in version)
    if version < OLDEST:
        needed = ".".join(str(part) for part in OLDEST)
        return refused(
            "sqlite", f"version {text}, {needed} or newer is needed", "install a newer Python"
        )
    if version < WAL_RESET_FIXED:
        return ok(
            "sqlite",
            f"version {text}, which can lose commits when a write and a checkpoint meet; ackbone "
            "lets them take turns, so it does not happen here if no other program writes to the "
            "file while workers run",
        )
    return ok("sqlite", f"version {text}")


def check_file_system(path: Path) -> Check:
    try:
        refuse_network(path)
    except StoreError as error:
        return refused("file system", str(error))
    return ok("file system", f"{path.parent} is on a local disk")


def check_schema(path: Path) -> Check:
    try:
        revision = current_revision(path)
    except StoreError as error:
        return refused("schema", str(error))
    empty = refused("schema", f"{path} holds no ackbone tables", checks.MIGRATE)
    return checks.check_revision(revision, HEAD, lambda: is_behind(path), empty)


def check_witness(path: Path) -> Check:
    """Compare the number of durable commits with the number in the file beside the database."""
    made = witnessed(path)  # read first: a writer counts here after its commit, never before
    with _reading(path) as conn:
        commits = conn.execute("SELECT commits FROM witness").fetchone()[0]
    if made is None:
        return warning(
            "witness",
            "its file is missing or cannot be read: lost commits would not be noticed",
            "the next write makes a new one",
        )
    if made > commits:
        return refused(
            "witness",
            f"{made} durable commits were made, {commits} are there: the last "
            f"{made - commits} went missing",
            "restore the files from a copy, or run 'ackbone recover'",
        )
    return ok("witness", f"{commits} durable commits, none missing")


def check_log(path: Path) -> Check:
    """Warn about a reader whose open transaction makes the write-ahead log grow without limit."""
    found = long_log(path)
    if found is not None:
        return warning("log", *found)
    return ok("log", "the write-ahead log is short")


def check_turn(path: Path) -> Check:
    """Warn about a stopped process that holds the write lock: no worker and no send can go on."""
    holder = who_writes(path)
    if holder is not None and holder.stopped:
        return warning("write lock", f"nothing can be written to {path}", why_no_turn(path))
    return ok("write lock", "no stopped process holds it")


def check_integrity(path: Path) -> Check:
    """Run SQLite's own check of every page and index. Reads the whole file."""
    try:
        with _reading(path) as conn:
            found = [row[0] for row in conn.execute("PRAGMA integrity_check(20)")]
    except StoreError as error:  # damaged so badly that the check itself gives up
        found = [str(error)]
    if found == ["ok"]:
        return ok("integrity", "every page and index is sound")
    return refused(
        "integrity",
        "; ".join(found[: checks.MOST_NAMED]),
        "stop the workers, copy the files, then run 'ackbone recover'",
    )


def check_bodies(path: Path) -> Check:
    """Compare every stored body with its checksum. Reads the whole file."""
    with _reading(path) as conn:
        return checks.check_bodies(
            (table, message_id, body, crc)
            for table in _BODIES
            for message_id, body, crc in conn.execute(
                f"SELECT message_id, body, body_crc FROM {table} WHERE body IS NOT NULL"
            )
        )


def last_event_us(path: Path) -> int | None:
    """Return the time of the last event in the ledger."""
    with _reading(path) as conn:
        found = conn.execute(
            "SELECT created_at FROM event_log ORDER BY rowid DESC LIMIT 1"
        ).fetchone()
    return None if found is None else int(found[0])


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5)) as conn:
            yield conn
    except sqlite3.Error as error:
        raise translate(error, path) from error
