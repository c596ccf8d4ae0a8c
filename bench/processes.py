"""Worker processes of the bench: started, waited for, measured, never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
APP = f"{Path(__file__).with_name('app.py')}:app"
LIMIT_S = 600.0
"""No process of the bench needs so long, however slow the machine."""


class ProcessFailed(Exception):
    """A process of the bench did not do what it was for."""


class Measured:
    """A child process as a context: `with Measured(command) as child: child.wait()`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.command = list(command)
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=stdin,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env={**_environment(), **(env or {})},
                start_new_session=True,  # its children end with it
            )
        self.code: int | None = None
        self.cpu_s = 0.0

    def __enter__(self) -> Measured:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = self._look()
        with contextlib.suppress(ProcessLookupError):  # nobody is left of it
            os.killpg(self.process.pid, signal.SIGKILL)
        while not ended and not self._look():
            time.sleep(0.01)

    def wait(self, limit_s: float = LIMIT_S) -> None:
        """Until it ended by itself, well."""
        deadline = time.monotonic() + limit_s
        while not self._look():
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.command} took longer than {limit_s:.0f} s\n{self.tail}")
            time.sleep(0.01)
        if self.code != 0:
            raise ProcessFailed(f"{self.command} ended with {self.code}\n{self.tail}")

    def stop(self) -> None:
        """Ask it to end, and wait for an orderly one."""
        self.process.send_signal(signal.SIGTERM)
        self.wait()

    def check(self) -> None:
        """Raise if it ended: nobody told it to."""
        if self._look():
            raise ProcessFailed(f"{self.command} ended with {self.code}\n{self.tail}")

    def peak_mb(self) -> float:
        """The most memory that it has held so far (VmHWM), in MB."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise ProcessFailed(f"{self.command}: no VmHWM")

    @property
    def tail(self) -> str:
        """The end of what it said."""
        return self.log.read_text(errors="replace")[-2000:]

    def _look(self) -> bool:
        """True once it ended. `wait4` and no other call: it alone tells what the child used."""
        if self.code is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.process.returncode = self.code
                self.cpu_s = usage.ru_utime + usage.ru_stime
        return self.code is not None


def worker(
    home: Path, *, until_idle: bool = True, env: Mapping[str, str] | None = None
) -> Measured:
    """One worker process on the database of `home`, through the real supervisor's child."""
    command = [sys.executable, "-m", "ackbone.processes.worker_process", APP]
    return Measured(
        command + ["--until-idle"] * until_idle,
        log=home / "worker.log",
        cwd=home,
        env={"ACKBONE_HOME": str(home), **(env or {})},
    )


def rate_of(command: Sequence[str], home: Path, **env: str) -> float:
    """The rate that a process of its own prints."""
    with Measured(command, log=home / "rate.log", env=env, cwd=ROOT) as child:
        child.wait()
        return float(json.loads(child.tail)["rate"])


def _environment() -> dict[str, str]:
    """Ours without settings of ackbone: every run has the defaults."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ACKBONE") and name not in ("COVERAGE_PROCESS_START",)
    }
