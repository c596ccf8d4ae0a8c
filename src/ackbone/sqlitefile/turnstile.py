"""A fair write lock between processes.

SQLite's own busy handler polls, so one of two busy writers may starve for seconds. Two flocks make
a turnstile: the next writer waits inside the gate, and the one that has just written queues behind
it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ackbone.core.errors import StoreUnavailable

from .holders import why_no_turn


class Turnstile:
    """`with turnstile:` holds the right to write. There is one per process and file. Not
    reentrant."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gate = os.open(f"{path}.gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._given_up = False
        self._deciding = threading.Lock()

    def __enter__(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._write, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.flock(self._write, fcntl.LOCK_UN)

    def try_enter(self) -> bool:
        """Take the right to write if no process has it or waits for it. Never blocks."""
        try:
            fcntl.flock(self._gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            fcntl.flock(self._write, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        return True

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """As `with turnstile`, but raise StoreUnavailable if the turn does not come in time.

        A blocked flock cannot be given up, and a polling process would lose against waiting ones.
        So a thread of its own waits, and releases the lock if it comes too late.
        """
        came = threading.Event()
        threading.Thread(target=self._wait, args=(came,), daemon=True).start()
        came.wait(seconds)
        with self._deciding:
            self._given_up = not came.is_set()
        if self._given_up:
            raise StoreUnavailable(no_turn(self._path, seconds))
        try:
            yield
        finally:
            self.__exit__(None, None, None)

    def _wait(self, came: threading.Event) -> None:
        self.__enter__()
        with self._deciding:
            if not self._given_up:
                came.set()
                return
        self.__exit__(None, None, None)
        self._close()

    def close(self) -> None:
        """Close the lock files. A thread that still waits for them closes them itself."""
        with self._deciding:
            if self._given_up:
                return
        self._close()

    def _close(self) -> None:
        os.close(self._gate)
        os.close(self._write)


def no_turn(path: Path, seconds: float) -> str:
    """Return the error text of a write that gave up waiting for its turn."""
    return f"{path} could not be written within {seconds:g} s. {why_no_turn(path)}"
