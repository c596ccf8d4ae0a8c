"""One place for a worker under the supervisor: its process, and how its starts and ends went."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ackbone.core.errors import AckboneError

from .launcher import Launcher, Process, spawn
from .start_report import StartListener

EXIT_RECYCLE = 75
"""Exit code of a worker that must be replaced: a handler cannot be stopped, or blocks the event
loop."""
RESTART_MAX_S = 10.0
HEALTHY_S = 10.0
"""A worker that stays up this long counts as a successful start."""


class WorkerPlace:
    """The process of one worker, or the time when the next one starts."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.crashed = False
        """The last process ended by a crash after it had begun to run messages."""
        self.since = 0.0
        self.restart_at = 0.0
        self.failures = 0
        """How many processes in a row ended soon after their start."""
        self.failed_starts = 0
        """How many starts in a row failed. An end that a message caused does not count."""
        self.last_words = ""
        """Why the last process did not come up, in its own words."""
        self.refusal: AckboneError | None = None
        """Why its last start was refused, if the next one would be refused as well."""
        self.summary: str | None = None
        """The queues that its worker serves, once a worker has come up."""
        self.drain_s = 0.0
        """How long that worker lets runs finish. An app may have its own settings for this."""
        self.done = False
        self._listener: StartListener | None = None

    @property
    def is_up(self) -> bool:
        """Return True if there is a process and it has come up."""
        return self.process is not None and self._listener is not None and self._listener.is_up

    def listen(self) -> None:
        if self.summary is None and self._listener is not None and self._listener.is_up:
            self.summary = self._listener.summary
            self.drain_s = self._listener.drain_s

    def heard_of_suspects(self) -> bool:
        """Return True if its process reported that suspects wait."""
        return self._listener is not None and self._listener.heard_of_suspects()

    def start(self, target: str, options: Sequence[str], launcher: Launcher | None) -> None:
        self._listener = listener = StartListener()
        self.refusal = None
        try:
            if self.crashed:
                options = [*options, "--cautious"]
            if launcher is not None:
                self.process = launcher.start([target, *options], report_fd=listener.theirs)
            else:
                report = ["--report-fd", str(listener.theirs)]
                self.process = spawn(target, [*options, *report], pass_fds=[listener.theirs])
        except OSError:
            listener.close()
            raise
        finally:
            listener.handed_over()
        self.since = time.monotonic()

    def ended(self, code: int) -> bool:
        """Record the end of the process. Returns True if it had come up and stopped in order.

        The exit code alone does not say so: a message may end a worker with any code.
        """
        self.process = None
        soon = time.monotonic() - self.since < HEALTHY_S
        self.failures = self.failures if soon else 0
        well = in_order = False
        if self._listener is not None:
            self._listener.close()
            self.last_words = self._listener.last_words
            self.refusal = self._listener.refusal
            stopped = self._listener.has_stopped
            well = self._listener.is_up and not (soon and stopped and code == os.EX_SOFTWARE)
            in_order = well and stopped and code == os.EX_OK
            worked = self._listener.has_worked
            self.crashed = well and worked and not in_order and code != EXIT_RECYCLE
        self.failed_starts = 0 if well else self.failed_starts + 1
        return in_order

    def pause_s(self, code: int) -> float:
        """Return how long to wait before the next start: longer each time the process fails soon
        after its start, but not at all after a crash while it ran messages."""
        if code == EXIT_RECYCLE or self.crashed:
            return 0.0
        self.failures += 1
        return min(RESTART_MAX_S, 0.1 * 2.0 ** (self.failures - 1))
