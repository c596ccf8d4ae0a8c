"""Recovery of a damaged database file.

`inspect` finds out what is wrong, and changes nothing. `recover` copies the files aside, then makes
the database usable again. If commits are missing, it continues from the last one that is there. If
pages are damaged, it saves every readable row into a new file. The report and the ledger say what
was lost. Nothing is recovered automatically: a person has to accept the loss.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sqlite3
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ackbone.core.clock import SystemClock
from ackbone.core.errors import Conflict, NotFound, StoreCorrupt
from ackbone.core.events import RECOVERED
from ackbone.core.ids import uuid7_bytes
from ackbone.core.message import DEFAULT_TENANT
from ackbone.sqlitefile.faults import translate
from ackbone.sqlitefile.file import TURN_WAIT_S
from ackbone.sqlitefile.sharing import Turnstile, is_alive
from ackbone.sqlitefile.wal import Witness, witnessed

from .migrate import ensure_schema, tables_of
from .salvage import Saved, salvage

_WITH_BODIES = ("messages", "queue_executions", "dead_letters", "outbox")
_MOST_PROBLEMS = 100
_PARTS = ("", "-wal", ".witness")
"""The files of a database, by the end of their names."""


class TableReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of one table."""

    name: str
    rows: int | None
    """Number of rows. None: the pages cannot be read."""
    bad_checksums: int = 0
    """Stored bodies that are not those that were written. Each becomes a dead letter at its
    claim."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a file contains, what is missing, and what was done about it."""

    path: str
    commits: int | None
    """Durable commits in the database. None: it cannot be read."""
    witnessed: int | None
    """Durable commits that were made. None: the witness is missing or unreadable."""
    problems: Sequence[str] = ()
    """Findings of SQLite's integrity check."""
    tables: Sequence[TableReport] = ()
    workers: Sequence[int] = ()
    """Workers that are alive on this file."""
    copy: str | None = None
    """Folder with the files as they were before `recover`."""
    lost_commits: int = 0
    lost_rows: Mapping[str, int] = {}
    """Rows that could not be read, by table, as far as the indexes show."""

    @property
    def gap(self) -> int:
        """Durable commits that went missing."""
        if self.commits is None or self.witnessed is None:
            return 0
        return max(0, self.witnessed - self.commits)

    @property
    def sound(self) -> bool:
        """True if nothing is missing and every page can be read."""
        return self.commits is not None and not self.problems and self.gap == 0

    @property
    def summary(self) -> str:
        """One sentence that says what is wrong."""
        if self.commits is None:
            return f"{self.path} cannot be read: {'; '.join(self.problems[:3])}"
        if self.problems:
            return f"{self.path} is damaged: {'; '.join(self.problems[:3])}"
        if self.gap:
            return (
                f"{self.path} holds {self.commits} of {self.witnessed} durable commits: "
                f"the last {self.gap} went missing"
            )
        return f"{self.path} holds all of its {self.commits} durable commits"


def inspect(path: Path) -> Report:
    """Check a database, its witness, its pages and its checksums, without changing anything."""
    path = path.resolve()
    if not path.exists():
        raise NotFound(f"there is no database {path}")
    made = witnessed(path)
    commits: int | None = None
    problems: list[str] = []
    tables: list[TableReport] = []
    uri = f"{path.as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30)) as conn:
            tables = [_look(conn, name) for name in tables_of(conn)]
            problems = _problems(conn)
            commits = int(conn.execute("SELECT commits FROM witness").fetchone()[0])
    except (sqlite3.DatabaseError, TypeError) as error:
        problems = problems or [str(error)]
    return Report(
        path=str(path),
        commits=commits,
        witnessed=made,
        problems=problems,
        tables=tables,
        workers=_alive(path),
    )


def recover(path: Path, *, accept_loss: bool) -> Report:
    """Make the database usable again. A sound file is left alone.

    Raises without changing anything if the loss is not accepted, if a worker is alive, or if
    another process has the file open.
    """
    path = path.resolve()
    before = inspect(path)
    if before.workers:
        numbers = ", ".join(str(number) for number in before.workers)
        raise Conflict(f"worker {numbers} is alive on {path}: stop all workers, then recover")
    if before.sound:
        return before
    if not accept_loss:
        raise StoreCorrupt(
            f"{before.summary}. Nothing was changed. Restore the files from a copy, if there is "
            "one. To continue without what is missing, accept the loss"
        )
    try:
        with (
            contextlib.closing(Turnstile(path)) as turnstile,
            turnstile.within(TURN_WAIT_S),
        ):
            copy = _copy_aside(path)
            _refuse_while_open(path, copy)
            saved = _rebuild(path, copy) if before.problems else []
            _go_on(path, before, copy, saved)
    except (sqlite3.Error, OSError) as error:
        raise translate(error, path) from error
    after = inspect(path)
    return msgspec.structs.replace(
        after, copy=str(copy), lost_commits=before.gap, lost_rows=_lost(saved)
    )


# -- inspect --------------------------------------------------------------------------------------


def _look(conn: sqlite3.Connection, table: str) -> TableReport:
    rows: int | None = None
    bad = 0
    with contextlib.suppress(sqlite3.DatabaseError):
        rows = conn.execute(f"SELECT count(*) FROM {table} NOT INDEXED").fetchone()[0]
        if table in _WITH_BODIES:
            stored = conn.execute(
                f"SELECT body, body_crc FROM {table} WHERE body IS NOT NULL"
                " AND body_crc IS NOT NULL"
            )
            bad = sum(
                not isinstance(body, bytes) or zlib.crc32(body) != crc for body, crc in stored
            )
    return TableReport(name=table, rows=rows, bad_checksums=bad)


def _problems(conn: sqlite3.Connection) -> list[str]:
    try:
        found = [str(row[0]) for row in conn.execute(f"PRAGMA integrity_check({_MOST_PROBLEMS})")]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def _alive(path: Path) -> list[int]:
    """Return the workers that hold their lock. A suspended one may continue at any moment."""
    folder = Path(f"{path}.workers")
    if not folder.is_dir():
        return []
    numbers = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
    clock = SystemClock()
    return [n for n in numbers if is_alive(folder, n, lease_s=math.inf, clock=clock)]


# -- recover --------------------------------------------------------------------------------------


def _copy_aside(path: Path) -> Path:
    """Copy the files into a folder beside them, and sync it before anything is changed."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    folder = Path(f"{path}.before-recovery-{stamp}")
    folder.mkdir(mode=0o700)
    for part in _PARTS:
        source = Path(f"{path}{part}")
        if source.exists():
            _sync(Path(shutil.copy2(source, folder / source.name)))
    _sync(folder)
    _sync(folder.parent)
    return folder


def _refuse_while_open(path: Path, copy: Path) -> None:
    """Refuse if another process has the file open: it would write into the old one.

    SQLite gives an exclusive lock only to a connection that is the only one.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=1)) as conn:
        try:
            conn.execute("PRAGMA locking_mode=EXCLUSIVE")
            conn.execute("BEGIN EXCLUSIVE")
            conn.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                shutil.rmtree(copy)
                raise Conflict(f"{path} is open in another process: end it, then recover") from None
        except sqlite3.DatabaseError:
            return  # too damaged to be locked, so no process can use it


def _rebuild(path: Path, copy: Path) -> list[Saved]:
    """Replace the database by a new one with every row that can be read from the copy."""
    fresh = Path(f"{path}.salvage")
    _remove(fresh)
    try:
        ensure_schema(fresh)
        saved = salvage(copy / path.name, fresh)
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as conn:
            conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        _sync(fresh)
    except BaseException:
        _remove(fresh)
        shutil.rmtree(copy)  # nothing has been changed yet
        raise
    # Remove the old log first: replayed into the new file it would destroy it. Both are in the
    # copy.
    for part in ("-wal", "-shm"):
        Path(f"{path}{part}").unlink(missing_ok=True)
    fresh.replace(path)
    _remove(fresh)
    _sync(path.parent)
    return saved


def _remove(database: Path) -> None:
    for part in ("", "-wal", "-shm", ".gate", ".lock", ".migrate.lock"):
        Path(f"{database}{part}").unlink(missing_ok=True)


def _go_on(path: Path, before: Report, copy: Path, saved: Sequence[Saved]) -> None:
    """Continue counting from the witness, and write into the ledger what is missing."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as conn:
        conn.execute("PRAGMA journal_mode=WAL")
        conn.execute("PRAGMA synchronous=FULL")
        conn.execute("BEGIN IMMEDIATE")
        held = conn.execute("SELECT commits FROM witness").fetchone()[0]
        commits = max(held, before.commits or 0, before.witnessed or 0) + 1
        conn.execute("UPDATE witness SET commits = ?", (commits,))
        _tell_ledger(
            conn,
            {
                "commits": before.commits,
                "witnessed": before.witnessed,
                "lost_commits": before.gap,
                "lost_rows": _lost(saved),
                "problems": list(before.problems[:10]),
                "copy": copy.name,
            },
        )
        conn.execute("COMMIT")
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with contextlib.closing(Witness(path)) as witness:
        witness.write(commits)


def _tell_ledger(conn: sqlite3.Connection, data: Mapping[str, object]) -> None:
    """Write one event, in a chain of its own."""
    from ackbone.store.ledger import GENESIS, link

    now_us = time.time_ns() // 1000
    worker_id = conn.execute(
        "INSERT INTO workers (name, state, started_at, ended_at) VALUES ('recovery', 'left', ?, ?)",
        (now_us, now_us),
    ).lastrowid
    record = (1, DEFAULT_TENANT, "", "", RECOVERED, json.dumps(data), now_us, worker_id or 0)
    seq, tenant_id, subscription, task_id, event_type, text, created_at, writer = record
    conn.execute(
        "INSERT INTO event_log (id, tenant_id, subscription, task_id, event_type, data, created_at,"
        " worker_id, seq, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            uuid7_bytes(),
            tenant_id,
            subscription,
            task_id,
            event_type,
            text,
            created_at,
            writer,
            seq,
            link(GENESIS, record),
        ),
    )


def _lost(saved: Sequence[Saved]) -> dict[str, int]:
    return {table.table: table.lost for table in saved if table.lost}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
