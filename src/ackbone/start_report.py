"""How a worker process reports to its supervisor that it is up, or why it is not: one pipe.

Its exit code alone does not say: a message may kill a worker with any code, and only a worker that
never came up makes another start useless. A worker that is up also reports that it has begun to run
messages, that messages wait which need a process of their own, and that it ends by itself.
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
"""Errors that the same app and configuration raise at each start, by the first line they get."""
_LINES = 8
"""Of an error: the last ones name it, and where it came from."""
_MOST_BYTES = 16_384
"""Less than a pipe holds, so that writing it never waits."""


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
        """Whether a supervisor reads this report, and prints what is in it."""
        return self._fd is not None

    def up(self, summary: str = "", *, drain_s: float = 0.0) -> None:
        """`summary`: what the worker serves, for the supervisor's ready line. `drain_s`: how long
        its running work may take to finish after a stop."""
        self._is_up = True
        line = " ".join([str(drain_s), *summary.split()]).encode("utf-8", "replace")[:_MOST_BYTES]
        self._say(_UP + line + b"\n")

    def works(self) -> None:
        """The first message is about to run."""
        self._say(_WORK)

    def suspects(self) -> None:
        """Messages wait for child processes."""
        self._say(_SUSPECTS)

    def stops(self) -> None:
        """The worker ends by itself, whatever its exit code is. A message did not end it."""
        self._say(_STOPS)

    def refused(self, error: ConfigError | AppNotLoaded) -> None:
        """The app or its configuration is wrong, and will be at the next start."""
        from ackbone.observe.redact import redact

        kind = next(name for name, refusal in _REFUSALS.items() if isinstance(error, refusal))
        lines = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
        words = "\n".join([kind, *(redact(line.replace("\n", " ")) for line in lines)])
        self._end(words.encode("utf-8", "replace")[:_MOST_BYTES])

    def failed(self, error: BaseException) -> None:
        from ackbone.observe.redact import redact

        text = str(error)  # ours say all
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
            with contextlib.suppress(OSError):  # nobody listens any more, or not fast enough
                os.write(self._fd, words)


class StartListener:
    """The supervisor's end: `theirs` goes to the worker, and is closed here after that."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._heard = b""
        self._works = False
        self._suspects = False
        self._stops = False

    def handed_over(self) -> None:
        os.close(self.theirs)

    @property
    def is_up(self) -> bool:
        """Did it come up? Stays true when it is gone."""
        self._listen()
        return self._heard.startswith(_UP)

    @property
    def summary(self) -> str:
        """What it serves; empty if it is not up."""
        return self._line.partition(" ")[2]

    @property
    def drain_s(self) -> float:
        """How long it may take to stop; 0 if it is not up."""
        return float(self._line.partition(" ")[0] or 0.0)

    @property
    def _line(self) -> str:
        return self._text.splitlines()[1] if self.is_up else ""

    @property
    def has_worked(self) -> bool:
        """Did it begin to run messages? Stays true when it is gone."""
        self._listen()
        return self._works

    @property
    def has_stopped(self) -> bool:
        """Did it say that it ends by itself?"""
        self._listen()
        return self._stops

    def heard_of_suspects(self) -> bool:
        """Did it say since the last call that messages wait for child processes?"""
        self._listen()
        said, self._suspects = self._suspects, False
        return said

    @property
    def refusal(self) -> AckboneError | None:
        """The error that keeps this app from starting at all, if the worker reported one."""
        kind, _, words = self._text.partition("\n")
        if kind == "config":
            return ConfigError(words.splitlines())
        return AppNotLoaded(words) if kind == "app" else None

    @property
    def last_words(self) -> str:
        """Why it did not come up; empty if it could not say."""
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
            signals = later[0] if later else b""
            self._works = self._works or _WORK in signals
            self._suspects = self._suspects or _SUSPECTS in signals
            self._stops = self._stops or _STOPS in signals
            self._heard = b"\n".join([up, summary, b""])
