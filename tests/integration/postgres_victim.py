"""Run by test_postgres_schema.py as a process of its own: migrates in children that are killed.

    postgres_victim.py <url of a database>

It imports everything first and forks, so that a child costs milliseconds. The nth child kills
itself before its nth statement; the last one comes to its end. Prints JSON: for each, the statement
(null for the last one), and the revision, tables and walled tables that others see then.
"""

import itertools
import json
import os
import signal
import sys
from typing import Any

import alembic.command  # noqa: F401 - for the children
import psycopg
import sqlalchemy.dialects.postgresql.psycopg  # noqa: F401

from ackbone.store.postgres import migrate


def kill_at(n: int, url: str) -> str | None:
    """Migrate in a child that kills itself before its nth statement; what that would have been."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        execute, seen = psycopg.Cursor.execute, 0

        def counted(self: Any, query: Any, *args: Any, **kw: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == n:
                os.write(write, str(query)[:60].encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return execute(self, query, *args, **kw)

        psycopg.Cursor.execute = counted  # type: ignore[method-assign]
        status = 1
        try:
            status = 0 if migrate.upgrade(url) else 2
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        statement = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return statement
    assert os.WEXITSTATUS(status) == 0
    return None


def seen(url: str) -> tuple[str | None, list[str], list[str]]:
    with psycopg.connect(url, autocommit=True) as conn:
        found = conn.execute(
            "SELECT relname, relrowsecurity FROM pg_class WHERE relkind IN ('r', 'p')"
            " AND relnamespace = 'public'::regnamespace ORDER BY relname"
        ).fetchall()
    walled = [name for name, on in found if on]
    return migrate.current_revision(url), [name for name, _ in found], walled


def main(url: str) -> None:
    results = []
    for n in itertools.count(1):
        statement = kill_at(n, url)
        results.append((statement, *seen(url)))
        if statement is None:
            break
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
