"""Files that are there whole or not at all. What a folder lists is on the disk after `sync`: one is
enough for many files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ackbone.core.errors import StoreError, StoreFull

Stamp = tuple[int, int, int]
"""Changes with a file's content."""


def write(path: Path, body: bytes, *, new: bool = False) -> bool:
    """The file is the old one or the new one, whole, whatever happens.

    `new`: False, and nothing changed, if it is there already, whoever else writes it just now.
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
    """For good; False: it was gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _translated(error, path) from error
    return True


def move(path: Path, folder: Path) -> bool:
    """Into another folder, in one step; False: it was gone."""
    try:
        os.replace(path, folder / path.name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _translated(error, path) from error
    return True


def sync(*folders: Path) -> None:
    """What was moved, written and removed in them stays so."""
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
    """Names, and what changes with their content. Raises StoreError."""
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
        return StoreFull(f"no room left for {path}; nothing was taken")
    return StoreError(f"{path} cannot be written: {error.strerror}")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else who asks for this changes anything in the folder meanwhile, in any process.

    Not twice by one thread: it would wait for itself.
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
    """What a killed process did not finish to write was never promised to anybody."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody writes it
            path.unlink()


@contextlib.contextmanager
def _begun(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is known to be written just now: not to be swept away, nor by two at once."""
    while True:
        with open(path, "ab", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):  # else it was swept away, or put in its place, before that
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
