"""A private PostgreSQL: its own folder, a socket instead of a port.

ACKBONE_TEST_POSTGRES_URL names one to use instead, where a test needs no server of its own: each
test gets a new database in it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import SkipTest
from urllib.parse import urlsplit

import psycopg

from tests.servers.faketime import ClockFile

STARTS_WITHIN_S = 60.0
STOPS_WITHIN_S = 30.0
OUTSIDE_URL = os.environ.get("ACKBONE_TEST_POSTGRES_URL", "")
_ROLE = "app"
_numbers = itertools.count(1)
_RUN = f"{os.getpid()}_{os.urandom(3).hex()}"
"""A server of somebody else's may hold what an earlier run or another machine's left behind."""


def postgres_server() -> PostgresServer | OutsidePostgres:
    """For tests that need a server, whichever; not started yet."""
    return OutsidePostgres(OUTSIDE_URL) if OUTSIDE_URL else PostgresServer()


class _Databases:
    """Databases of one test each, in a server that runs."""

    def url(self, database: str) -> str:
        raise NotImplementedError

    def execute(self, statement: str) -> None:
        """One statement outside of every transaction, in a database that is nobody's."""
        raise NotImplementedError

    def new_database(self, *, template: str | None = None) -> str:
        """The name of an empty database, or of a copy of `template`."""
        name = f"ab_{_RUN}_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        return name

    def drop(self, database: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")


class OutsidePostgres(_Databases):
    """A server of somebody else's: used in databases of our own, otherwise left alone."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self, database: str) -> str:
        # By hand: urlunsplit leaves the slashes of postgresql:///name?host=/folder out.
        parts = urlsplit(self._url)
        query = f"?{parts.query}" if parts.query else ""
        return f"{parts.scheme}://{parts.netloc}/{database}{query}"

    def execute(self, statement: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as conn:
            conn.execute(statement)

    def start(self) -> None:
        """It runs, or the test that uses it says that it does not."""

    def remove(self) -> None:
        """It goes on running."""


class PostgresServer(_Databases):
    """Started, killed, paused and started again by tests. Not by root: PostgreSQL refuses that."""

    def __init__(self, *settings: str) -> None:
        self._bin = _programs()
        self._folder = Path(tempfile.mkdtemp(prefix="ab-pg-", dir="/tmp"))
        self._data = self._folder / "data"
        self._user: int | None = None
        if os.geteuid() == 0:
            self._user = _unprivileged()
            os.chown(self._folder, self._user, -1)
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.clock: ClockFile | None = None

    def use_clock(self) -> ClockFile:
        """From its next start on the server goes by this clock."""
        self.clock = ClockFile(self._folder / "clock")
        return self.clock

    def url(self, database: str = "postgres", *, role: str = _ROLE) -> str:
        return f"postgresql://{role}@/{database}?host={self._folder}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as conn:
            conn.execute(statement)

    def demand_passwords(self, role: str) -> None:
        """From now on this role logs in with its password; others still need none."""
        rules = self._data / "pg_hba.conf"
        rules.write_text(f"local all {role} scram-sha-256\n{rules.read_text()}")
        self.execute("SELECT pg_reload_conf()")

    def start(self) -> None:
        if not self._data.exists():
            self._run(
                "initdb", "-D", str(self._data), "-U", _ROLE, "--auth=trust", "--no-sync",
                "-E", "UTF8", "--locale=C.UTF-8",
            )  # fmt: skip
        # Commits survive kill -9 of the server without fsync: they are in the system's memory.
        settings = ("listen_addresses=", "fsync=off", "max_connections=200", *self._settings)
        command = [str(self._bin / "postgres"), "-D", str(self._data), "-k", str(self._folder)]
        for setting in settings:
            command += ["-c", setting]
        variables = {} if self.clock is None else self.clock.variables
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self._folder,
                env={**os.environ, **variables},
            )
        self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "postgres did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """As `kill -9` does, to the server and to every process of it."""
        if self._process is None:
            return
        for pid in (*_children(self._process.pid), self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """In order, and at once: connections are cut, commits are kept."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(STOPS_WITHIN_S)
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stands still: connections stay open and get no answer."""
        for pid in (self.pid, *_children(self.pid)):
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in (*_children(self.pid), self.pid):
            os.kill(pid, signal.SIGCONT)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url(), connect_timeout=5).close()
            return True
        return False

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._bin / program, *arguments],
            user=self._user,
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]


def _children(pid: int) -> Sequence[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


def _programs() -> Path:
    """The folder of `initdb` and `postgres`: Debian keeps them off the PATH, one per version."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    if OUTSIDE_URL:
        raise SkipTest(
            "this needs a PostgreSQL of its own: ACKBONE_TEST_POSTGRES_URL is not enough"
        )
    raise AssertionError("PostgreSQL is missing: run tests/prepare.sh (Debian package postgresql)")


def _unprivileged() -> int:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    raise AssertionError("PostgreSQL does not run as root, and there is no user postgres or nobody")
