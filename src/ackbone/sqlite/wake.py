"""Telling the other processes on this file that there is work: one datagram, no polling.

Each listening process binds a socket in `<db>.wake/`. A lost datagram costs a second at most (the
readers look by themselves that often), so nothing here is allowed to raise.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

WORK, OUTGOING = b"w", b"o"
"""What there may be: messages to run; replies and follow-ups to carry out."""
_MAX_PATH = 100
"""A socket's path ends at 108 bytes."""


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
        """This process's socket, readable when someone woke it; None if it cannot be bound."""
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
                continue  # its buffer is full: it has been woken already
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._dir_fd)  # its process is gone

    def drain(self) -> bytes:
        """Empty this process's socket; returns the topics that it was woken for."""
        topics = b""
        if self._listener is not None:
            with contextlib.suppress(BlockingIOError):
                while rung := self._listener.recv(64):
                    topics += rung if rung not in topics else b""
        return topics

    def sweep(self) -> int:
        """Remove the sockets of processes that are gone; returns how many."""
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
