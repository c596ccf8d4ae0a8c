"""Wake-ups for the other processes of a file: one datagram, no polling.

Each listening process binds a socket in `<db>.wake/`. A lost datagram costs at most a second,
because readers also look that often by themselves. So nothing here may raise.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

WORK, OUTGOING = b"w", b"o"
"""Topics of a wake-up: messages to run; replies and follow-ups to send."""
_MAX_PATH = 100
"""Longest path of a socket, in bytes."""


class Wake:
    """The sockets of one file."""

    def __init__(self, path: Path) -> None:
        self.folder = Path(f"{path}.wake")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._dir_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        self._listener: socket.socket | None = None
        self._name = f"{os.getpid()}-{os.urandom(3).hex()}"
        self._peers: list[str] = []
        self._peers_seen = -1

    def listen(self) -> socket.socket | None:
        """Return this process's socket, which a wake-up makes readable, or None if binding
        failed."""
        if self._listener is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sock.setblocking(False)
            try:
                sock.bind(self._address(self._name))
            except OSError:
                sock.close()
                return None
            self._listener = sock
        return self._listener

    def ring(self, topics: bytes) -> None:
        """Wake every other process."""
        for name in self._others():
            try:
                self._sender.sendto(topics, self._address(name))
            except (BlockingIOError, InterruptedError):
                continue  # its buffer is full, so it has wake-ups to read
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._dir_fd)  # its process has ended

    def drain(self) -> bytes:
        """Read all wake-ups of this process. Returns their topics."""
        topics = b""
        if self._listener is not None:
            with contextlib.suppress(BlockingIOError):
                while rung := self._listener.recv(64):
                    topics += rung if rung not in topics else b""
        return topics

    def sweep(self) -> int:
        """Remove the sockets of processes that have ended. Returns how many."""
        removed = 0
        for name in self._others():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(self._address(name))  # sends nothing
                except ConnectionRefusedError:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=self._dir_fd)
                        removed += 1
                except OSError:
                    continue
        return removed

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._dir_fd)
            self._listener = None
        self._sender.close()
        os.close(self._dir_fd)

    def _others(self) -> list[str]:
        with contextlib.suppress(OSError):
            stamp = os.fstat(self._dir_fd).st_mtime_ns
            if stamp != self._peers_seen:
                self._peers = [n for n in os.listdir(self._dir_fd) if n != self._name]
                self._peers_seen = stamp
        return self._peers

    def _address(self, name: str) -> str:
        path = f"{self.folder}/{name}"
        return path if len(path) < _MAX_PATH else f"/proc/self/fd/{self._dir_fd}/{name}"
