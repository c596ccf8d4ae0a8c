"""Files that exist whole or not at all. `sync` makes the entries of a folder durable."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ackbone.core.errors import StoreError, StoreFull

Stamp = tuple[int, int, int]
"""Inode, time and size: another content has another stamp."""


def write(path: Path, body: bytes, *, new: bool = False) -> bool:
    """Write a file; after a crash it has the old content or the new one, never a part.

    `new`: change nothing and return False if the file exists, even if another process is creating
    it at this moment.
    """
    unfinished = path.with_suffix(".tmp")
    try:
        with _begun(unfinished) as file:
            if new and path.exists():
                unfinished.unlink()
                return False
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise _translated(error, path) from error
    return True


def remove(path: Path) -> bool:
    """Remove a file for good; return False if it was gone."""
    return _changed(path, lambda: os.unlink(path), path.parent)


def move(path: Path, folder: Path) -> bool:
    """Move a file into another folder in one step; return False if it was gone."""
    return _changed(path, lambda: os.replace(path, folder / path.name), folder, path.parent)


def _changed(path: Path, change: Callable[[], None], *folders: Path) -> bool:
    try:
        change()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _translated(error, path) from error
    sync(*folders)
    return True


def sync(*folders: Path) -> None:
    """Make everything durable that was written, moved or removed in these folders."""
    for folder in folders:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise _translated(error, folder) from error


def listed(folder: Path, ending: str = ".json") -> list[tuple[str, Stamp]]:
    """Return the names of files and their stamps. Raises StoreError."""
    found = []
    try:
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(ending) and not entry.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat()
                        if entry.is_file():
                            found.append((entry.name, _stamp(stat)))
    except OSError as error:
        raise unreadable(error, folder) from error
    return found


def unreadable(error: OSError, path: Path) -> StoreError:
    return StoreError(f"{path} cannot be read: {error.strerror}")


def _translated(error: OSError, path: Path) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"no room left for {path}; nothing was written")
    return StoreError(f"{path} cannot be written: {error.strerror}")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which other threads and processes wait for before they change files.

    A thread that holds it must not ask for it again: it would wait for itself.
    """
    path = folder / ".write.lock"
    fd = -1
    try:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
        except FileNotFoundError as error:
            raise unreadable(error, folder) from error
        except OSError as error:
            raise _translated(error, path) from error
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def sweep(folder: Path) -> None:
    """Remove unfinished files of killed processes. Their content was never acknowledged."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if it is being written
            path.unlink()


@contextlib.contextmanager
def _begun(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file under a lock, so that it is neither swept away nor written by two at once."""
    while True:
        with open(path, "ab", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):  # otherwise it was swept away or renamed in between
                file.truncate(0)
                yield file
                return


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
