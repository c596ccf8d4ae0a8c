"""The pipe by which a worker process reports to its supervisor that it is up, or why it is not.

The exit code alone does not say that: a message may kill a worker with any code, and only a worker
that never came up makes another start useless. A worker that is up also reports that it has begun
to run messages, that suspects wait, and that it stops by itself.
"""

from __future__ import annotations

import contextlib
import os
import traceback

from ackbone.core.errors import AckboneError, AppNotLoaded, ConfigError

_UP = b"up\n"
_WORK = b"work\n"
_SUSPECTS = b"suspects\n"
_STOPS = b"stops\n"
_REFUSALS: dict[str, type[AckboneError]] = {"config": ConfigError, "app": AppNotLoaded}
"""Errors that the same app and configuration raise at each start, by the first line of a report."""
_LINES = 8
"""Lines of an error that are reported. The last ones name it and its place."""
_MOST_BYTES = 16_384
"""The size limit of a report: less than a pipe holds, so that writing never waits."""


class StartReport:
    """The worker's end. A worker that never came up reports its error."""

    def __init__(self, fd: int | None) -> None:
        if fd is not None:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)
        self._fd = fd
        self._is_up = False

    @property
    def is_heard(self) -> bool:
        """True if a supervisor reads this report and prints it."""
        return self._fd is not None

    def up(self, summary: str = "", *, drain_s: float = 0.0) -> None:
        """Report that the worker is up. `summary`: what it serves, for the supervisor's ready line.
        `drain_s`: how long its runs may take to finish after a stop."""
        self._is_up = True
        line = " ".join([str(drain_s), *summary.split()]).encode("utf-8", "replace")[:_MOST_BYTES]
        self._say(_UP + line + b"\n")

    def works(self) -> None:
        """Report that the first message is about to run."""
        self._say(_WORK)

    def suspects(self) -> None:
        """Report that suspects wait for child processes."""
        self._say(_SUSPECTS)

    def stops(self) -> None:
        """Report that the worker stops by itself: no message ended it, whatever its exit code."""
        self._say(_STOPS)

    def refused(self, error: ConfigError | AppNotLoaded) -> None:
        """Report that the app or its configuration is wrong, so that the next start fails too."""
        from ackbone.observe.redact import redact

        kind = next(name for name, refusal in _REFUSALS.items() if isinstance(error, refusal))
        lines = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
        words = "\n".join([kind, *(redact(line.replace("\n", " ")) for line in lines)])
        self._end(words.encode("utf-8", "replace")[:_MOST_BYTES])

    def failed(self, error: BaseException) -> None:
        from ackbone.observe.redact import redact

        text = str(error)  # the text of our own errors is enough
        if not isinstance(error, AckboneError):
            text = "".join(traceback.format_exception(error, chain=False))
        words = "\n".join(text.splitlines()[-_LINES:])
        self._end(redact(words).encode("utf-8", "replace")[-_MOST_BYTES:])

    def _end(self, words: bytes) -> None:
        if not self._is_up:
            self._say(words)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _say(self, words: bytes) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the supervisor is gone, or the pipe is full
                os.write(self._fd, words)


class StartListener:
    """The supervisor's end. `theirs` is given to the worker, then closed here."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._heard = b""
        self._signals: set[bytes] = set()
        """The lines that came after the first report."""

    def handed_over(self) -> None:
        os.close(self.theirs)

    @property
    def is_up(self) -> bool:
        """True if the worker came up. It stays True when the worker has ended."""
        self._listen()
        return self._heard.startswith(_UP)

    @property
    def summary(self) -> str:
        """The queues that the worker serves. Empty if it is not up."""
        return self._line.partition(" ")[2]

    @property
    def drain_s(self) -> float:
        """How long the worker may take to stop. 0 if it is not up."""
        return float(self._line.partition(" ")[0] or 0.0)

    @property
    def _line(self) -> str:
        return self._text.splitlines()[1] if self.is_up else ""

    @property
    def has_worked(self) -> bool:
        """True if the worker began to run messages. It stays True when the worker has ended."""
        return self._has_said(_WORK)

    @property
    def has_stopped(self) -> bool:
        """True if the worker reported that it stops by itself."""
        return self._has_said(_STOPS)

    def heard_of_suspects(self) -> bool:
        """Return True if the worker reported suspects since the last call."""
        said = self._has_said(_SUSPECTS)
        self._signals.discard(_SUSPECTS)
        return said

    def _has_said(self, line: bytes) -> bool:
        self._listen()
        return line in self._signals

    @property
    def refusal(self) -> AckboneError | None:
        """The error that keeps this app from starting at all, if the worker reported one."""
        kind, _, words = self._text.partition("\n")
        if kind == "config":
            return ConfigError(words.splitlines())
        return AppNotLoaded(words) if kind == "app" else None

    @property
    def last_words(self) -> str:
        """Why the worker did not come up. Empty if it reported nothing."""
        refusal = self.refusal
        return "" if self.is_up else str(refusal) if refusal is not None else self._text

    @property
    def _text(self) -> str:
        self._listen()
        return self._heard.decode("utf-8", "replace")

    def close(self) -> None:
        self._listen()
        os.close(self._ours)
        self._ours = -1

    def _listen(self) -> None:
        if self._ours >= 0:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self._ours, _MOST_BYTES):
                    self._heard += data
        if self._heard.startswith(_UP):
            up, summary, *later = self._heard.split(b"\n", 2)
            self._signals.update(b"".join(later).splitlines(keepends=True))
            self._heard = b"\n".join([up, summary, b""])
