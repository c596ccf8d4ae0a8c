"""The supervisor: keeps a number of worker processes running, and replaces those that end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence

from ackbone.core.machine import fate

from .launcher import Launcher
from .worker_place import WorkerPlace

SETTLE_S = 5.0
"""Time to hand back and to close, on top of the workers' own limit for finishing."""
MOST_FAILED_STARTS = 5
"""After this many failed starts in a row, while no other worker is up, the supervisor gives up."""


class Supervisor:
    """Keeps a number of workers running until it is told to stop."""

    def __init__(
        self,
        target: str,
        *,
        workers: int = 1,
        until_idle: bool = False,
        grace_s: float = 35.0,
        say: Callable[[str], None] = lambda text: None,
        ready: Callable[[str], None] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`ready` gets one line once all workers have come up."""
        self._target = target
        self._until_idle = until_idle
        name = uuid.uuid4().hex
        self._options = [*(["--until-idle"] if until_idle else []), "--parent", name, *options]
        self._warden_options = ["--warden", "--parent", name, *_log_level(options)]
        self._launcher: Launcher | None = None
        self._grace_s = grace_s
        self._say = say
        self._ready = ready
        self._said = ""
        """Why the last start failed, as printed. The same words are not printed twice."""
        self._places = [WorkerPlace() for _ in range(workers)]
        self._warden = WorkerPlace()
        self._stop_by: float | None = None
        self._was_up = False
        """True once a worker has come up. A login refused after that may be a changed password."""
        self._waits = False
        """True once it was said that the workers wait for a server."""
        self._code = 0

    def run(self) -> int:
        """Run until all workers have stopped. Returns the exit code: 0 after an orderly stop.

        Raises ConfigError or AppNotLoaded if no worker could ever start because of it.
        """
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        while True:
            for place in self._places:
                self._look(place)
                place.listen()
                self._allow(place.drain_s + SETTLE_S)
            self._tell_ready()
            self._check_refusals()
            self._look_at_warden()
            if all(place.done for place in self._places):
                return self._end()
            time.sleep(0.02)

    def stop(self, *_: object) -> None:
        """Ask the workers to drain. Asked a second time, kill them."""
        first = self._stop_by is None
        if first:
            self._stop_by = time.monotonic() + self._grace_s
        for place in (*self._places, self._warden):
            if place.process is not None:
                place.process.send_signal(signal.SIGTERM if first else signal.SIGKILL)

    def _allow(self, grace_s: float) -> None:
        """Give workers this long to stop, if they have less time now."""
        more_s = max(0.0, grace_s - self._grace_s)
        self._grace_s += more_s
        if self._stop_by is not None:
            self._stop_by += more_s

    def _tell_ready(self) -> None:
        if self._ready is None or any(place.summary is None for place in self._places):
            return
        ready, self._ready = self._ready, None
        n = len(self._places)
        workers = "1 worker" if n == 1 else f"{n} workers"
        ready(f"ready: {workers}, {self._places[0].summary}")

    def _check_refusals(self) -> None:
        """Raise why the starts were refused, if no worker has ever come up and none is starting."""
        refusals = [place.refusal for place in self._places if place.refusal is not None]
        if refusals and all(
            place.process is None and place.summary is None for place in self._places
        ):
            raise refusals[0]

    def _look(self, place: WorkerPlace) -> None:
        if place.done:
            return
        if place.process is None:
            if self._stop_by is not None:
                place.done = True
            elif time.monotonic() >= place.restart_at and not self._is_undecided(place):
                self._start(place, self._options, forked=place.crashed)
            return
        self._was_up = self._was_up or place.is_up
        code = place.process.poll()
        if code is None:
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                self._say(
                    f"worker {place.process.pid} did not stop in {self._grace_s:.0f} s: killed"
                )
                place.process.kill()
                place.process.wait()
            return
        self._ended(place, place.process.pid, code)

    def _is_undecided(self, place: WorkerPlace) -> bool:
        """Return True if its start was refused and no other worker has come up."""
        return place.refusal is not None and all(each.summary is None for each in self._places)

    def _look_at_warden(self) -> None:
        """Keep a warden running while workers report suspects."""
        asked = [place.heard_of_suspects() for place in self._places]
        warden = self._warden
        if warden.process is not None:
            code = warden.process.poll()
            if code is not None:
                self._warden_ended(warden.process.pid, code)
        elif any(asked) and self._stop_by is None and time.monotonic() >= warden.restart_at:
            self._start(warden, self._warden_options, forked=True)

    def _warden_ended(self, pid: int, code: int) -> None:
        warden = self._warden
        warden.ended(code)
        if code == os.EX_OK or self._stop_by is not None:
            return
        pause_s = warden.pause_s(code)
        warden.restart_at = time.monotonic() + pause_s
        why = f": {warden.last_words}" if warden.last_words else ""
        self._say(
            f"the process {pid} that looks after messages which crashed their workers ended"
            f" ({fate(code)}){why}; another one starts in {pause_s:.1f} s"
        )

    def _end(self) -> int:
        """All workers have stopped. Stop the warden and the launcher as well."""
        warden = self._warden.process
        if warden is not None:
            warden.send_signal(signal.SIGTERM)
            try:
                warden.wait(self._grace_s)
            except subprocess.TimeoutExpired:
                warden.kill()
        if self._launcher is not None:
            self._launcher.close()
        return self._code

    def _crash_launcher(self) -> Launcher | None:
        """Return the launcher, and start it the first time. None: it cannot be started."""
        if self._launcher is None:
            try:
                self._launcher = Launcher()
            except OSError as error:
                self._say(f"no launcher: {error}")
        return self._launcher

    def _start(self, place: WorkerPlace, options: Sequence[str], *, forked: bool) -> None:
        try:
            self._begin(place, options, forked=forked)
        except OSError as error:  # no room for another process: the others must go on
            if not self._was_up:
                raise
            place.crashed = False
            pause = place.pause_s(os.EX_OSERR)
            place.restart_at = time.monotonic() + pause
            self._say(f"a process could not be started ({error}); next try in {pause:.1f} s")

    def _begin(self, place: WorkerPlace, options: Sequence[str], *, forked: bool) -> None:
        launcher = self._crash_launcher() if forked else None
        try:
            place.start(self._target, options, launcher)
        except OSError as error:
            if launcher is None:
                raise
            self._say(f"the launcher failed ({error}); workers are started without it")
            self._launcher = None
            place.start(self._target, options, None)
        if self._stop_by is not None and place.process is not None:
            # `stop` was called while the process was being started, and could not signal it.
            place.process.send_signal(signal.SIGTERM)

    def _ended(self, place: WorkerPlace, pid: int, code: int) -> None:
        if place.ended(code) or self._stop_by is not None:
            place.done = True
        elif code == os.EX_NOPERM and not self._was_up:
            self._say("giving up: correct the settings, then run this again. Messages are kept.")
            self._end_all(place, 1)
        elif self._is_hopeless(place, code):
            self._say(f"worker {pid} ended ({fate(code)}), too: giving up. {self._why(place)}")
            self._end_all(place, 1)
        else:
            pause = place.pause_s(code)
            place.restart_at = time.monotonic() + pause
            self._tell_ended(place, pid, code, pause)
            if code == os.EX_UNAVAILABLE and not (self._was_up or self._waits or self._until_idle):
                self._waits = True
                self._say(
                    f"waiting for the server: {place.last_words}. Start it, or check `broker` and "
                    "`store` in ackbone.yaml. Messages are kept."
                )

    def _tell_ended(self, place: WorkerPlace, pid: int, code: int, pause: float) -> None:
        why = ""
        if place.refusal is not None:
            if all(each.summary is None for each in self._places):
                return  # printed when it is clear whether any worker can start
            why = f": {place.last_words}" if place.last_words != self._said else ": as before"
            self._said = place.last_words
        self._say(f"worker {pid} ended ({fate(code)}){why}; another one starts in {pause:.1f} s")

    def _is_hopeless(self, place: WorkerPlace, code: int) -> bool:
        """Return True if no worker is up and starting has failed again and again."""
        if code in (os.EX_UNAVAILABLE, os.EX_NOPERM) and not self._until_idle:
            return False  # a store or broker that is away may come back
        starts = place.failed_starts
        return starts >= MOST_FAILED_STARTS and not any(each.is_up for each in self._places)

    def _why(self, place: WorkerPlace) -> str:
        words = "".join(f"\n  {line}" for line in place.last_words.splitlines())
        said = f"The last one said:{words}" if words else "The last one could not say why."
        return (
            f"{place.failed_starts} starts in a row failed before any work began. {said}\n"
            f"Fix what stops {self._target} from starting, then run this again. Messages are kept."
        )

    def _end_all(self, place: WorkerPlace, code: int) -> None:
        self._code = code
        place.done = True
        self.stop()


def _log_level(options: Sequence[str]) -> list[str]:
    """Return the log level among the workers' options: the warden gets it as well."""
    if "--log-level" not in options:
        return []
    at = list(options).index("--log-level")
    return list(options[at : at + 2])
