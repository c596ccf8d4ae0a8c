"""A private Redis: its own folder, a socket instead of a port, every write in its log (AOF).

ACKBONE_TEST_REDIS_URL names one to use instead, where a test needs no server of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from unittest import SkipTest

from redis import Redis
from redis.exceptions import RedisError

from ackbone.brokers.redis.entries import LEVELS, key_of

BINARY = os.environ.get("ACKBONE_TEST_REDIS_SERVER", "redis-server")
"""Another program that is a Redis, to test with: an older one, a newer one, Valkey."""
STARTS_WITHIN_S = 30.0
OUTSIDE_URL = os.environ.get("ACKBONE_TEST_REDIS_URL", "")


def redis_server() -> RedisServer | OutsideRedis:
    """For tests that need a server, whichever; not started yet."""
    return OutsideRedis(OUTSIDE_URL) if OUTSIDE_URL else RedisServer()


class OutsideRedis:
    """A server of somebody else's: used, cleaned, and otherwise left alone."""

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> None:
        """It runs, or the test that uses it says that it does not."""

    def restart(self) -> None:
        raise SkipTest("ACKBONE_TEST_REDIS_URL is somebody else's server: it is not restarted")

    def forget(self, *queues: str) -> None:
        """All that a queue had: a stream for each priority, marks of what was published once."""
        with Redis.from_url(self.url) as client:
            for queue in queues:
                marks = client.scan_iter(match=f"{{{queue}}}*", count=10_000)
                client.delete(*(key_of(queue, level) for level in LEVELS), *marks)

    def remove(self) -> None:
        """It goes on running."""


class RedisServer:
    """Started, killed, paused and started again by tests."""

    def __init__(self, *settings: str) -> None:
        binary = shutil.which(BINARY)
        if not binary and OUTSIDE_URL:
            raise SkipTest("this needs a Redis of its own: ACKBONE_TEST_REDIS_URL is not enough")
        assert binary, "redis-server is missing: run tests/prepare.sh (Debian package redis-server)"
        self._folder = Path(tempfile.mkdtemp(prefix="ab-redis-", dir="/tmp"))
        self._socket = self._folder / "r.sock"
        self._command = [
            binary, "--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._folder),
            "--save", "", "--appendonly", "yes", "--appendfsync", "everysec", *settings,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def cli(self, *words: str) -> str:
        """What `redis-cli`, as a person uses it, answers."""
        command = ["redis-cli", "-s", str(self._socket), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def _client(self) -> Redis:
        return Redis.from_url(self.url, socket_timeout=2.0)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.01)

    def kill(self) -> None:
        """As `kill -9` does, once what it has answered stands in its file.

        Redis answers, and writes later, while a sync takes long: what a kill takes then is told in
        the guide, and is nothing that tests of ours could hold it to.
        """
        if self._process is not None:
            with contextlib.suppress(RedisError), self._client() as client:
                client.config_set("appendfsync", "always")  # the answer comes after the write
            self._process.kill()
            self._process.wait()
            self._process = None
            self._socket.unlink(missing_ok=True)

    def restart(self) -> None:
        self.kill()
        self.start()

    def forget(self, *queues: str) -> None:
        """They go with the folder."""

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        """PONG, and not while it still reads its log."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            client.connect(str(self._socket))
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith(b"+PONG")
        return False
