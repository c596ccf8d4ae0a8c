"""Channels by which a folder sends nothing: an empty file in `paused/` for each, of its name."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote

from holdfast.core.errors import InvalidMessage

from . import whole_files

LONGEST = 200
"""Bytes of a name, as a file has it."""


class PausedChannels:
    """Anybody may change them, by hand, too; they hold at a sender's next look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> frozenset[str]:
        return frozenset(unquote(name) for name, _ in whole_files.listed(self._folder, ending=""))

    def add(self, channel: str) -> bool:
        """On the disk when it returns. False: it was paused before."""
        path = self._path(channel)
        try:
            self._folder.mkdir(exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        except OSError as error:
            raise whole_files.translated(error, path) from error
        whole_files.sync(self._folder, self._folder.parent)
        return True

    def remove(self, channel: str) -> bool:
        """On the disk when it returns. False: it was not paused."""
        if not whole_files.remove(self._path(channel)):
            return False
        whole_files.sync(self._folder)
        return True

    def _path(self, channel: str) -> Path:
        # No slash leads elsewhere, no dot in front hides it.
        name = quote(channel, safe=" ").replace(".", "%2E")
        if not 0 < len(name) <= LONGEST:
            raise InvalidMessage(f"{channel!r:.60} is no channel's name")
        return self._folder / name
