"""Run by test_schema.py as a process of its own: migrates in children that are killed or race.

    migration_victim.py kill <folder> <tables|alembic|upgrade>
    migration_victim.py race <folder> <children> <rounds>

It imports everything first and forks, so that a child costs milliseconds. Prints JSON.
"""

import json
import os
import shutil
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import alembic.command  # noqa: F401 - for the children
import sqlalchemy  # noqa: F401

from ackbone.store import revisions
from ackbone.store.sqlite import migrate

NEXT = f"{int(revisions.HEAD) + 1:04}"
LATER = f'''
"""A later revision: new table, new column, and rows that are rewritten."""
import sqlalchemy as sa
from alembic import op
revision = "{NEXT}"
down_revision = "{revisions.HEAD}"

def upgrade():
    op.create_table("later", sa.Column("id", sa.Integer, primary_key=True))
    op.add_column("roles", sa.Column("note", sa.Text))
    op.execute("UPDATE roles SET note = role || '!'")
    op.create_index("idx_later", "roles", ["note"])
    op.execute("INSERT INTO later (id) SELECT 7 FROM roles")
'''


def with_later_revision(folder: Path) -> None:
    """Let this process believe in another revision."""
    shutil.copytree(revisions.MIGRATIONS, folder / "migrations")
    (folder / f"migrations/versions/{NEXT}_later.py").write_text(LATER)
    revisions.MIGRATIONS = folder / "migrations"
    revisions.HEAD = NEXT


def state(path: Path) -> Any:
    """All that a migration can change: the schema and every row."""
    if not path.exists() or not path.stat().st_size:
        return []
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        schema = conn.execute("SELECT type, name, sql FROM sqlite_master ORDER BY 2").fetchall()
        rows = {
            name: sorted(map(repr, conn.execute(f'SELECT * FROM "{name}"')))
            for kind, name, _ in schema
            if kind == "table"
        }
    return [schema, rows] if schema else []


def kill_at(n: int, path: Path) -> str | None:
    """Migrate in a child that kills itself before its nth statement; what that would have been."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        connect, seen = sqlite3.connect, 0

        def before(statement: str) -> None:
            nonlocal seen
            seen += 1
            if seen == n:
                os.write(write, statement[:60].encode())
                os.kill(os.getpid(), signal.SIGKILL)

        def traced(*args: Any, **kw: Any) -> sqlite3.Connection:
            conn: sqlite3.Connection = connect(*args, **kw)
            conn.set_trace_callback(before)
            return conn

        sqlite3.connect = traced  # type: ignore[assignment]
        status = 1
        try:
            status = 0 if migrate.ensure_schema(path) else 2
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        statement = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return statement
    assert os.WEXITSTATUS(status) == 0
    return None


def kill(folder: Path, mode: str) -> list[dict[str, Any]]:
    start = folder / "start.db"
    if mode == "upgrade":
        migrate.ensure_schema(start)
        with closing(sqlite3.connect(start)) as conn, conn:
            conn.execute("INSERT INTO roles (role) VALUES ('reaper')")
        with_later_revision(folder)
    elif mode == "alembic":
        migrate.make_tables = lambda conn: None
    old = state(start)
    seen: list[dict[str, Any]] = []
    while True:
        path = folder / f"{len(seen)}.db"
        if start.exists():
            shutil.copy(start, path)
        statement = kill_at(len(seen) + 1, path)
        if statement is None:
            break
        after = state(path)
        again = migrate.ensure_schema(path)
        seen.append({"statement": statement, "after": after, "again": again, "end": state(path)})
    new = state(path)
    for each in seen:
        after = each.pop("after")
        each["left"] = "old" if after == old else "new" if after == new else "broken"
        each["end"] = "new" if each["end"] == new else "broken"
    return seen


def race(folder: Path, children: int, rounds: int) -> list[list[int]]:
    """Exit codes per round: 10 made the schema, 11 found it made, others are errors."""
    results = []
    for round_ in range(rounds):
        path = folder / f"{round_}.db"
        start, go = os.pipe()
        pids = []
        for _ in range(children):
            pid = os.fork()
            if pid == 0:
                os.close(go)
                status = 1
                try:
                    os.read(start, 1)  # all wait here, and go at once
                    status = 10 if migrate.ensure_schema(path) else 11
                finally:
                    os._exit(status)
            pids.append(pid)
        os.close(start)
        os.close(go)
        results.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    return results


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        print(json.dumps(kill(Path(sys.argv[2]), sys.argv[3])))
    else:
        print(json.dumps(race(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
