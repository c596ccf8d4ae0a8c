"""What can be said about a SQLite file without opening it for work. Nothing here writes."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from ackbone.core.checks import Check, ok, refused, warning
from ackbone.core.errors import StoreError
from ackbone.sqlite.faults import refuse_network, translate
from ackbone.sqlite.holders import who_writes, why_no_turn
from ackbone.sqlite.log import long_log
from ackbone.sqlite.witness import witnessed
from ackbone.store import bodies
from ackbone.store.migrate import HEAD, current_revision, is_behind

OLDEST = (3, 35, 0)
"""RETURNING and UPDATE … FROM."""
WAL_RESET_MENDED = (3, 51, 3)
_BODIES = {
    "messages": "message_id",
    "queue_executions": "message_id",
    "dead_letters": "message_id",
    "outbox": "message_id",
}
_MOST_NAMED = 5


def check_version(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> Check:
    text = ".".join(str(part) for part in version)
    if version < OLDEST:
        needed = ".".join(str(part) for part in OLDEST)
        return refused(
            "sqlite", f"version {text}, {needed} or newer is needed", "install a newer Python"
        )
    if version < WAL_RESET_MENDED:
        return ok(
            "sqlite",
            f"version {text}, which can lose commits when a write and a checkpoint meet; ackbone "
            "lets them take turns, so it does not happen here",
            "let no other program write to the file while workers run",
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
    if revision == HEAD:
        return ok("schema", f"at {HEAD}, the newest")
    if revision is None:
        return refused("schema", f"{path} holds no ackbone tables", "run 'ackbone migrate'")
    if not (revision.isdigit() and revision < HEAD):
        try:
            is_behind(path)
        except StoreError as error:
            return refused("schema", str(error))
    return refused("schema", f"at {revision}, {HEAD} is needed", "run 'ackbone migrate'")


def check_witness(path: Path) -> Check:
    """Read before the database: a writer that is between the two is behind here, never ahead."""
    made = witnessed(path)
    with _reading(path) as conn:
        commits = conn.execute("SELECT commits FROM witness").fetchone()[0]
    if made is None:
        return warning(
            "witness",
            "there is none that can be read: lost commits could not be told",
            "the next write makes one",
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
    """A reader that keeps its transaction open makes the write-ahead log grow without limit."""
    found = long_log(path)
    if found is not None:
        return warning("log", *found)
    return ok("log", "the write-ahead log is short")


def check_turn(path: Path) -> Check:
    """A stopped process that holds the write lock stops every worker and every send."""
    holder = who_writes(path)
    if holder is not None and holder.stopped:
        return warning("write lock", f"nothing can be written to {path}", why_no_turn(path))
    return ok("write lock", "held by no stopped process")


def check_integrity(path: Path) -> Check:
    """SQLite's own check of every page and index. Reads the whole file."""
    try:
        with _reading(path) as conn:
            found = [row[0] for row in conn.execute("PRAGMA integrity_check(20)")]
    except StoreError as error:  # damaged so badly that the check itself gives up
        found = [str(error)]
    if found == ["ok"]:
        return ok("integrity", "every page and index is sound")
    return refused(
        "integrity",
        "; ".join(found[:_MOST_NAMED]),
        "stop the workers, copy the files, then run 'ackbone recover'",
    )


def check_bodies(path: Path) -> Check:
    """Every stored body against its checksum. Reads the whole file."""
    with _reading(path) as conn:
        return bodies.check_bodies(
            (table, message_id, body, crc)
            for table, column in _BODIES.items()
            for message_id, body, crc in conn.execute(
                f"SELECT {column}, body, body_crc FROM {table} WHERE body IS NOT NULL"
            )
        )


def last_event_us(path: Path) -> int | None:
    """When the ledger was last written to."""
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
