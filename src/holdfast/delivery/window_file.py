"""The windows of a folder's limits, in one small file: they hold after a restart, too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.core.errors import StoreError
from holdfast.core.parcels import Windows
from holdfast.core.windows import Window

from . import whole_files
from .file_queue import log

_decode = msgspec.json.Decoder(dict[str, Window]).decode


class WindowFile:
    """What is in memory counts; the file is for the next process."""

    def __init__(self, path: Path) -> None:
        self.all: Windows = {}
        self._path = path

    def read(self) -> None:
        """None, or one that cannot be read: nothing is known of earlier calls."""
        try:
            self.all = _decode(self._path.read_bytes())
        except FileNotFoundError:
            self.all = {}
        except (OSError, ValueError) as error:
            log.warning("[delivery] %s says nothing of earlier calls: %s", self._path, error)
            self.all = {}

    def copies(self, keys: Iterable[str]) -> Windows:
        """Those that there are of these, to try something with."""
        found = ((key, self.all[key]) for key in keys if key in self.all)
        return {
            key: Window(dict(each.calls), each.blocked_until, each.back_until)
            for key, each in found
        }

    def move(self, by_us: int) -> None:
        """Somebody set the clock: what was to end by the old one ends by the new one."""
        for window in self.all.values():
            window.calls = {name: until + by_us for name, until in window.calls.items()}
            window.blocked_until = max(0, window.blocked_until + by_us)
            window.back_until = max(0, window.back_until + by_us)

    def write(self, now_us: int) -> None:
        """Without those that say nothing any more."""
        self.all = {key: window for key, window in self.all.items() if window.ends_at > now_us}
        try:
            whole_files.write(self._path, msgspec.json.encode(self.all))
        except StoreError as error:  # in memory they hold all the same
            log.warning("[delivery] %s", error)
