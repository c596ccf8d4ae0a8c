"""The witness: a file beside the database with the number of its durable commits.

SQLite silently drops a damaged end of its log. The number of durable commits is in the database
and, after each commit, in `<db>.witness`. A database that is behind its witness has lost commits.
The witness is not synced: after a power cut it may be behind the database, but never ahead.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

_FORM = struct.Struct("<8sQ32sI")
_MAGIC = b"HFWITN1\0"


class Witness:
    """The file `<db>.witness`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(f"{path}.witness")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> int | None:
        """Return the number. None for a new or unreadable file, which proves nothing."""
        return _commits_of(os.pread(self._fd, _FORM.size, 0))

    def write(self, commits: int, head: bytes = b"") -> None:
        """Write the number in place, without a sync. It must never be ahead of the database."""
        body = _FORM.pack(_MAGIC, commits, head[:32].ljust(32, b"\0"), 0)[:-4]
        os.pwrite(self._fd, body + zlib.crc32(body).to_bytes(4, "little"), 0)

    def close(self) -> None:
        os.close(self._fd)


def witnessed(path: Path) -> int | None:
    """Return the number of the witness of a database, without creating the file."""
    try:
        return _commits_of(Path(f"{path}.witness").read_bytes()[: _FORM.size])
    except FileNotFoundError:
        return None


def _commits_of(data: bytes) -> int | None:
    if len(data) < _FORM.size:
        return None
    magic, commits, _head, crc = _FORM.unpack(data)
    if magic != _MAGIC or crc != zlib.crc32(data[:-4]):
        return None
    return int(commits)
