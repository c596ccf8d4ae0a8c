"""How a worker process tells its supervisor that it is up, or why it is not: one pipe, one message.

Its exit code alone does not say: a message may kill a worker with any code, and only a worker that
never came up makes another start useless.
"""

from __future__ import annotations

import contextlib
import os
import traceback

from holdfast.core.errors import HoldfastError

_UP = b"up\n"
_LINES = 8
"""Of an error: the last ones name it, and where it came from."""
_MOST_BYTES = 4096
"""Less than a pipe holds, so that writing it never waits."""


class StartReport:
    """The worker's end. The first thing that is said counts."""

    def __init__(self, fd: int | None) -> None:
        if fd is not None:
            os.set_inheritable(fd, False)
        self._fd = fd

    def up(self) -> None:
        self._say(_UP)

    def failed(self, error: BaseException) -> None:
        from holdfast.observe.redact import redact

        text = str(error)  # ours say all
        if not isinstance(error, HoldfastError):
            text = "".join(traceback.format_exception(error, chain=False))
        words = "\n".join(text.splitlines()[-_LINES:])
        self._say(redact(words).encode("utf-8", "replace")[-_MOST_BYTES:])

    def _say(self, words: bytes) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(fd, words)
        os.close(fd)


class StartListener:
    """The supervisor's end: `theirs` goes to the worker, and is closed here after that."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._heard = b""

    def handed_over(self) -> None:
        os.close(self.theirs)

    @property
    def is_up(self) -> bool:
        """Did it come up? Stays true when it is gone."""
        self._listen()
        return self._heard.startswith(_UP)

    @property
    def last_words(self) -> str:
        """Why it did not come up; empty if it could not say."""
        return "" if self.is_up else self._heard.decode("utf-8", "replace")

    def close(self) -> None:
        self._listen()
        os.close(self._ours)
        self._ours = -1

    def _listen(self) -> None:
        if self._ours >= 0:
            with contextlib.suppress(BlockingIOError):
                self._heard += os.read(self._ours, _MOST_BYTES)
