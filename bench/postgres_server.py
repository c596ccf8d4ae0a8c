"""A private PostgreSQL for the bench: its own folder, a socket instead of a port, every sync on."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from .measure import Unavailable
from .processes import ProcessFailed

_ROLE = "bench"
_STARTS_WITHIN_S = 60.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class PostgresServer:
    """`with PostgresServer(folder) as server:` makes a database below `folder`, gone afterwards.

    It never runs as root, which PostgreSQL refuses, so its own folder is one that others may enter.
    """

    def __init__(self, below: Path) -> None:
        self._bin = _programs()
        self._folder = Path(tempfile.mkdtemp(prefix="abb-pg-", dir=below))
        self._user: int | None = None
        if os.geteuid() == 0:
            self._user = pwd.getpwnam("nobody").pw_uid
            os.chown(self._folder, self._user, -1)
        self._log = self._folder / "log"
        self.url = f"postgresql://{_ROLE}@/postgres?host={self._folder}"

    def __enter__(self) -> PostgresServer:
        data = self._folder / "data"
        made = ["initdb", "-D", str(data), "-U", _ROLE, "--auth=trust", "-E", "UTF8", "--no-sync"]
        self._run([str(self._bin / made[0]), *made[1:]]).wait()
        command = [str(self._bin / "postgres"), "-D", str(data), "-k", str(self._folder)]
        self._process = self._run([*command, "-c", "listen_addresses="])
        deadline = time.monotonic() + _STARTS_WITHIN_S
        ready = [str(self._bin / "pg_isready"), "-q", "-h", str(self._folder)]
        while subprocess.run(ready, check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise ProcessFailed(f"postgres did not start\n{self._log.read_text()[-2000:]}")
            time.sleep(0.02)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        shutil.rmtree(self._folder)

    def cpu_s(self) -> float:
        """CPU time that all its processes have used so far, those that ended included."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return _cpu_s(pid, 4) + sum(_cpu_s(int(child), 2) for child in children)

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, user=self._user, cwd=self._folder
            )


def _cpu_s(pid: int, fields: int) -> float:
    """User and system time; with 4 fields that of children that ended, too."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:  # it ended just now
        return 0.0
    return sum(int(each) for each in found[11 : 11 + fields]) * _TICK_S


def has_postgres() -> bool:
    """Is there one to start?"""
    return _found() is not None


def _programs() -> Path:
    found = _found()
    if found is None:
        raise Unavailable("postgres is missing (Debian package postgresql)")
    return found.parent


def _found() -> Path | None:
    """Debian puts its programs where no PATH looks, a folder for each version."""
    newest = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    named = shutil.which("postgres")
    if newest:
        return newest[-1]
    return None if named is None else Path(named)
