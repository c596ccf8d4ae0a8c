"""A private Redis for the bench: its own folder and port, every write in its log (AOF everysec)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from .measure import Unavailable
from .processes import ProcessFailed

BINARY = "redis-server"
_STARTS_WITHIN_S = 30.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class RedisServer:
    """`with RedisServer(folder) as server:`; all contenders reach it by the same TCP port."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which(BINARY)
        if binary is None:
            raise Unavailable(f"{BINARY} is missing (Debian package redis-server)")
        self._log = folder / "redis.log"
        port = _free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        self._command = [
            binary, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder),
            "--save", "", "--appendonly", "yes", "--appendfsync", "everysec",
            # A rewrite of the log takes a core for seconds, from whoever's turn it happens to be.
            "--auto-aof-rewrite-percentage", "0",
        ]  # fmt: skip
        self.client: Any = Redis.from_url(self.url, protocol=2)

    def __enter__(self) -> RedisServer:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise ProcessFailed(f"{BINARY} did not start\n{self._log.read_text()[-2000:]}")
            time.sleep(0.01)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()

    def cpu_s(self) -> float:
        """CPU time that it has used so far, with its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except RedisError:
            return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
