"""A fair write lock between processes.

SQLite's own busy handler polls: of two writers in a row one may starve for seconds. Two flocks make
a turnstile: whoever waits stands inside the gate, so the one that just wrote has to queue behind.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class Turnstile:
    """`with turnstile:` holds the right to write. One per process and file; not reentrant."""

    def __init__(self, path: Path) -> None:
        self._gate = os.open(f"{path}.gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

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

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._write)
