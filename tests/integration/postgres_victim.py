"""Run by test_postgres_schema.py as a process of its own: migrates in children that are killed.

    postgres_victim.py <url of an empty database>...

It imports everything first and forks, so that a child costs milliseconds. The nth child kills
itself before its nth statement, in the nth database. Prints JSON: the statements.
"""

import json
import os
import signal
import sys
from typing import Any

import alembic.command  # noqa: F401 - for the children
import psycopg
import sqlalchemy.dialects.postgresql.psycopg  # noqa: F401

from holdfast.store.postgres import migrate


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


if __name__ == "__main__":
    killed = [kill_at(n, url) for n, url in enumerate(sys.argv[1:], 1)]
    print(json.dumps(killed))
