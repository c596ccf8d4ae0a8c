"""A terminal that is written to while a person types, and the lines they type."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .output import dump

PROMPT = "You > "
_CLEAR = "\r\x1b[K"
_CHUNK = 65_536


def to_terminal(text: str) -> None:
    """Write past Python's buffer of standard output, in which two writers would mix lines."""
    rest = text.encode("utf-8", "backslashreplace")
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]


class Screen:
    """Writes whole lines, in order, above the prompt.

    A thread writes, so that a terminal stopped with Ctrl-S blocks nothing else.
    """

    def __init__(
        self,
        *,
        prompt: str = "",
        as_json: bool = False,
        write: Callable[[str], None] = to_terminal,
    ) -> None:
        """`prompt` is empty if the input is not a terminal."""
        self._prompt = prompt
        self._as_json = as_json
        self._write = write
        self._prompting = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ackbone-screen")

    def show(self, text: str, record: dict[str, Any] | None = None) -> Future[None]:
        """Write one or more lines (no line break at the end), or the record with --json.

        The future ends when the text is written, or with the OSError that prevented it.
        """
        line = dump(record or {"line": text}) if self._as_json else text
        return self._thread.submit(self._show, line)

    def ask(self) -> None:
        """Show the prompt."""
        if self._prompt:
            self._thread.submit(self._ask)

    def answered(self) -> None:
        """Note that the person pressed Enter: the cursor is on the line below the prompt."""
        self._thread.submit(self._answered, "")

    def leave(self) -> None:
        """End the prompt; later output starts on a new line."""
        self._thread.submit(self._answered, "\n")

    def close(self) -> None:
        """Return when everything is written."""
        self._thread.shutdown(wait=True)

    def _show(self, text: str) -> None:
        if self._prompting:
            self._write(f"{_CLEAR}{text}\n{self._prompt}")
        else:
            self._write(f"{text}\n")

    def _ask(self) -> None:
        self._prompting = True
        self._write(self._prompt)

    def _answered(self, end: str) -> None:
        if self._prompting and end:
            self._write(end)
        self._prompting = False


class TypedLines:
    """The lines from a file descriptor: a terminal, a pipe or a file.

    No thread reads them, because it could not be stopped before the person presses Enter.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._rest = b""
        self._loop = asyncio.get_running_loop()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            self._loop.add_reader(self._fd, self._readable)
        except PermissionError:  # a regular file never blocks
            while self._take(os.read(self._fd, _CHUNK)):
                pass
        try:
            while (line := await self._lines.get()) is not None:
                yield line
        finally:
            self._loop.remove_reader(self._fd)

    def end(self) -> None:
        """End the iteration after the lines that were already typed."""
        self._lines.put_nowait(None)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, _CHUNK)
        except OSError:  # the terminal is gone
            data = b""
        if not self._take(data):
            self._loop.remove_reader(self._fd)

    def _take(self, data: bytes) -> bool:
        """Split data into lines; return False at the end of the input."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            whole.append(self._rest)
        for line in whole:
            self._lines.put_nowait(line.decode("utf-8", "replace").removesuffix("\r"))
        if not data:
            self.end()
        return bool(data)
