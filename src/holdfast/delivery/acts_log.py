"""What people did to the replies of a folder, and who: one line of JSON for each act."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.core.events import Entry

from . import whole_files


class ActsLog:
    """A file that only grows. It is written before the act: none is without its line.

    Who sends from the folder reads on in it, and tells those who listen there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def add(self, entries: Sequence[Entry], now_us: int) -> None:
        """On the disk when it returns. For who is alone in the folder."""
        if not entries:
            return
        text = "".join(f"{_line(entry, now_us)}\n" for entry in entries)
        whole_files.append(self._path, text.encode("utf-8", "backslashreplace"))
        whole_files.sync(self._path.parent)

    def skip(self) -> None:
        """What was done before is no news."""
        self._offset = self._size()

    def news(self) -> list[Entry]:
        """What was done since this was asked last; only whole lines count."""
        size = self._size()
        if size < self._offset:  # somebody began a new one
            self._offset = 0
        if size == self._offset:
            return []
        found, self._offset = self._read(self._offset)
        return [_entry(each) for each in found]

    def all(self) -> list[dict[str, Any]]:
        """The first act first."""
        return self._read(0)[0]

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise whole_files.unreadable(error, self._path) from error

    def _read(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """What stands behind this place, and where it ends."""
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                text, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise whole_files.unreadable(error, self._path) from error
        found = []
        for line in text.splitlines():
            try:
                each = json.loads(line)
            except ValueError:
                continue  # half a line that a kill left behind
            if isinstance(each, dict) and isinstance(each.get("type"), str):
                found.append(each)
        return found, offset + len(text) + len(newline)


def _line(entry: Entry, now_us: int) -> str:
    tenant_id, _, task_id, kind, data = entry
    told = {"at": now_us / 1e6, "type": kind, "tenant_id": tenant_id, "task_id": task_id, **data}
    return json.dumps(told, ensure_ascii=False)


def _entry(line: dict[str, Any]) -> Entry:
    data = {name: value for name, value in line.items() if name not in _NOT_DATA}
    return str(line.get("tenant_id")), "", str(line.get("task_id", "")), line["type"], data


_NOT_DATA = ("at", "type", "tenant_id", "task_id")
