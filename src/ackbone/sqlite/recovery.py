"""A file that was refused: what is wrong with it, and how to go on with what is left.

`inspect` looks and changes nothing. `recover` copies the files aside, then makes the database whole
again: where commits are missing it goes on from the last one that is there; where pages are damaged
it saves every row that can be read into a new file. What was lost stands in the report and in the
ledger. Nothing is recovered by itself: a person has to accept the loss.
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

from .faults import translate
from .file import TURN_WAIT_S
from .liveness import is_alive
from .salvage import Saved, salvage
from .turnstile import Turnstile
from .witness import Witness, witnessed

_WITH_BODIES = ("messages", "queue_executions", "dead_letters", "outbox")
_MOST_PROBLEMS = 100
_PARTS = ("", "-wal", ".witness")
"""What makes up a database, by the end of the files' names."""


class TableReport(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    name: str
    rows: int | None
    """None: its pages cannot be read."""
    bad_checksums: int = 0
    """Stored bodies that are not what was written; each is dead-lettered when its turn comes."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds, what it lacks, and what was done about it."""

    path: str
    commits: int | None
    """Durable commits that the database holds; None: it cannot be read."""
    witnessed: int | None
    """Durable commits that were made; None: the witness is missing or unreadable."""
    problems: Sequence[str] = ()
    """What SQLite's integrity check found."""
    tables: Sequence[TableReport] = ()
    workers: Sequence[int] = ()
    """Workers that are alive on this file."""
    copy: str | None = None
    """Where `recover` put the files as they were."""
    lost_commits: int = 0
    lost_rows: Mapping[str, int] = {}
    """Rows that no page gave back, by table, as far as the indexes tell."""

    @property
    def gap(self) -> int:
        """Durable commits that went missing."""
        if self.commits is None or self.witnessed is None:
            return 0
        return max(0, self.witnessed - self.commits)

    @property
    def sound(self) -> bool:
        """Nothing is missing and every page can be read."""
        return self.commits is not None and not self.problems and self.gap == 0

    @property
    def summary(self) -> str:
        """What is wrong, in a sentence."""
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
    """Look at a database, its witness, its pages and its checksums. Changes nothing."""
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
            tables = [_look(conn, name) for name in _tables(conn)]
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
    """Make the database usable again. Raises, and has changed nothing, unless the loss is accepted.

    Refuses while workers live or another process has the file open. Leaves a sound file alone.
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
            "one; to go on without what is missing, say that the loss is accepted"
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


# -- looking --------------------------------------------------------------------------------------


def _tables(conn: sqlite3.Connection) -> list[str]:
    found = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return [str(name) for (name,) in found if not str(name).startswith("sqlite_")]


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
    """Whoever holds its lock: one that stands still may go on at any moment."""
    folder = Path(f"{path}.workers")
    if not folder.is_dir():
        return []
    numbers = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
    clock = SystemClock()
    return [n for n in numbers if is_alive(folder, n, lease_s=math.inf, clock=clock)]


# -- mending --------------------------------------------------------------------------------------


def _copy_aside(path: Path) -> Path:
    """The files as they are, in a folder beside them, on the disk before anything is changed."""
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
    """Another process, which is no worker, may have the file open: it would write into the old one.

    An exclusive lock is given only to the one connection there is.
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
            return  # too damaged to be locked, so nobody works on it


def _rebuild(path: Path, copy: Path) -> list[Saved]:
    """A new database with every row that the copy gives back, in the place of the old one."""
    from ackbone.store.migrate import ensure_schema

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
        shutil.rmtree(copy)  # nothing was changed yet
        raise
    # The old log first: replayed into the new file it would destroy it. Both are in the copy.
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
    """Count on from what was witnessed, and write into the ledger what is missing."""
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
    """One event in a chain of its own."""
    from ackbone.store.chain import GENESIS, link

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
