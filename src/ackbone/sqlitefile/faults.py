"""Errors of SQLite and of the file system, translated into ours."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from ackbone.core.errors import StoreCorrupt, StoreError, StoreFull, StoreUnavailable

from .sharing import why_no_turn

_NETWORK = ("nfs", "cifs", "smb", "fuse.sshfs", "ceph", "gluster", "lustre", "afs")


def translate(error: BaseException, path: Path) -> BaseException:
    """Translate an error of SQLite. Errors of a single value, and all others, stay as they are."""
    if not isinstance(error, sqlite3.Error | OSError) or isinstance(error, StoreError):
        return error
    text = str(error)
    if is_full(error):
        return StoreFull(
            f"no room left on the disk of {path}; nothing was written. Free some space"
        )
    if isinstance(error, sqlite3.DatabaseError) and (
        "malformed" in text or "not a database" in text or "corrupt" in text
    ):
        return StoreCorrupt(
            f"{path} is damaged ({text}). Restore it from a copy, or see 'ackbone recover'"
        )
    if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError) or _is_unbindable(error):
        return error
    if "locked" in text:
        text = f"{text}. {why_no_turn(path)}"
    return StoreUnavailable(f"{path} cannot be written just now: {text}")


def refuse_network(path: Path) -> None:
    """Refuse a network file system: SQLite's locks do not work there."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    folder = str(path.resolve().parent)
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    if kind.startswith(_NETWORK):
        raise StoreError(
            f"{path} lies on a network file system ({kind}), where SQLite cannot keep its promise. "
            "Set ACKBONE_HOME to a folder on a local disk"
        )


def is_full(error: BaseException) -> bool:
    """Return True if the disk was full."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    if not isinstance(error, sqlite3.OperationalError):
        return False
    # The index of the log is a file of its own. If it cannot grow, SQLite reports an I/O error.
    code = getattr(error, "sqlite_errorcode", None)  # errors of the Python module have no code
    return code == sqlite3.SQLITE_IOERR_SHMSIZE or "full" in str(error)


def _is_unbindable(error: BaseException) -> bool:
    """Return True for a value of a type that SQLite does not have. Such an error has no code."""
    return isinstance(error, sqlite3.ProgrammingError) and "Error binding" in str(error)
