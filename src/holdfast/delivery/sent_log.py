"""Which replies of a folder arrived lately: their files are gone, and an id may come again."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from . import whole_files

KEPT = 10_000
"""So many are remembered, at least."""
AGAIN = "\tagain"


class SentLog:
    """Lines of ids, in one file; `again` behind a tab marks one that may have arrived twice. Its
    folder's sender writes it; everybody may ask."""

    def __init__(self, path: Path, *, kept: int = KEPT) -> None:
        self._path = path
        self._kept = kept
        self._ids: dict[str, str] = {}
        """Each with its line."""
        self._inode = -1
        self._offset = 0

    def __contains__(self, delivery_id: str) -> bool:
        self._read()
        return delivery_id in self._ids

    def add(self, ids: Collection[str], *, again: Collection[str] = ()) -> None:
        """On the disk when it returns. `again`: those of them that are repeats."""
        if not ids:
            return
        self._read()
        added = {each: f"{each}{AGAIN}" if each in again else each for each in ids}
        self._ids |= added
        text = "".join(f"{line}\n" for line in added.values())
        whole_files.append(self._path, text.encode())
        if len(self._ids) > 2 * self._kept:
            self.shorten()

    def shorten(self) -> None:
        """Forget the oldest, and the half of a line that a kill left behind."""
        self._read()
        newest = list(self._ids.values())[-self._kept :]
        if self._path.exists():
            whole_files.write(self._path, "".join(f"{line}\n" for line in newest).encode())
            self._ids = {}
            self._read()

    def _read(self) -> None:
        """What was added since; only whole lines count. Raises StoreError."""
        try:
            self._read_on()
        except FileNotFoundError:
            return
        except OSError as error:
            raise whole_files.unreadable(error, self._path) from error

    def _read_on(self) -> None:
        stat = self._path.stat()
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._inode, self._offset = stat.st_ino, 0
        if stat.st_size == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(lines) + len(newline)
        found = lines.decode("utf-8", "replace").splitlines()
        self._ids |= {line.removesuffix(AGAIN): line for line in found if line}
