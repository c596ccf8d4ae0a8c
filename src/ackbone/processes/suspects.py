"""Suspects: messages that were running when their workers crashed, more than once.

They run in child processes of a warden. The warden runs no message itself, so that no message can
end it, and learns how each child ended. A worker that finds suspects asks for a warden.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ackbone.core.errors import StoreError
from ackbone.core.store import GROUP, Company, Offers, Suspects, Worker

from .launcher import Launcher, Process, spawn

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.engine.worker import EngineWorker

    from .start_report import StartReport

log = logging.getLogger("ackbone.suspects")

STEP_S = 0.1
LOOK_S = 1.0
"""How often the warden looks for children that give no sign of life."""
HOLD_S = 2.0
"""How long no child is started after one could not come up: the next one could not, either."""
QUIET_S = 1.5
"""A process for suspects ends after this time without suspects."""
_NOT_UP = (os.EX_CONFIG, os.EX_UNAVAILABLE, os.EX_NOPERM)
"""Exit codes of a worker that did not come up: settings, or a server without a free connection."""
YOUNG_S = 1.5
"""A child younger than this may not have claimed its first messages yet."""


async def suspects_of(app: App, worker: Worker) -> Suspects:
    """Count the suspects of an app that wait for child processes. Paused queues do not count."""
    names = [sub.name for sub in app.subscriptions()]
    found = await app.store.suspects(names, worker=worker)
    if not (found.few or found.none):
        return found
    paused = await app.store.paused()
    paused |= {name for name, queue in app.config.queues.items() if queue.paused}
    served = [name for name in names if name not in paused]
    return found if served == names else await app.store.suspects(served, worker=worker)


async def no_suspects(app: App, worker: EngineWorker, company: Company) -> None:
    """Return once this child runs no suspect and none waits. A suspect may run for any time."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S:
        await asyncio.sleep(0.2)
        try:
            waiting = await suspects_of(app, worker.worker)
            waits = waiting.few if company is Company.FEW else waiting.none
        except StoreError as error:
            log.warning("could not check for suspect messages: %s", error)
            waits = 1
        if waits or worker.running:
            quiet_since = time.monotonic()


class SuspectWatch:
    """Asks the supervisor for a warden while suspects wait. Without one it starts the warden."""

    def __init__(self, app: App, target: str, report: StartReport | None = None) -> None:
        self._app = app
        self._target = target
        self._report = report
        self.warden: subprocess.Popen[bytes] | None = None

    async def step(self, worker: Worker) -> None:
        waiting = await suspects_of(self._app, worker)
        if not (waiting.few or waiting.none):
            return
        if self._report is not None and self._report.is_heard:
            self._report.suspects()
        elif self.warden is None or self.warden.poll() is not None:
            self.warden = spawn(self._target, ["--warden"])


class Child(NamedTuple):
    """A process that runs suspects."""

    process: Process
    company: Company
    started_at: float


class Warden:
    """Starts children while suspects wait, and tells the store how each of them ended."""

    def __init__(self, app: App, target: str, options: Sequence[str] = ()) -> None:
        self._app = app
        self._target = target
        self._options = list(options)
        self._role = f"warden {app.kind}"
        self._offers = Offers(types=app.handled_types())
        """The message types that the children claim. The warden itself claims nothing."""
        self._at_most = app.config.worker.solo_children
        self._launcher: Launcher | None = None
        self._ended: dict[str, int] = {}
        """Exit codes that the store does not know yet, by worker name."""
        self._reported: dict[str, int] = {}
        """Exit codes that the store was told."""
        self._looked_at = -math.inf
        self._held_until = -math.inf
        self.children: list[Child] = []
        self.is_stopping = False
        self.waiting = Suspects()
        """The suspects that waited at the last step."""

    async def step(self, worker: Worker) -> None:
        """Report children that ended, then start the children that are needed."""
        await self._report(worker)
        like_children = msgspec.structs.replace(worker, offers=self._offers)
        self.waiting = await suspects_of(self._app, like_children)
        wanted = {
            company: starts
            for company, children in (
                (Company.NONE, self.waiting.none),
                (Company.FEW, math.ceil(self.waiting.few / GROUP)),
            )
            if (starts := self._missing(company, children)) > 0
        }
        if wanted and await self._app.store.hold_role(self._role, worker=worker):
            for company, starts in wanted.items():
                self._start(company, starts, worker)

    def stop(self) -> None:
        """Start no more children, and ask those that run to finish."""
        self.is_stopping = True
        for child in self.children:
            child.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the launcher. Children that are left end with it."""
        if self._launcher is not None:
            self._launcher.close()

    async def _report(self, worker: Worker) -> None:
        now = self._app.clock.monotonic()
        for child in list(self.children):
            code = child.process.poll()
            if code is not None:
                self.children.remove(child)
                self._ended[self._name(child)] = code
                if code in _NOT_UP:
                    self._held_until = now + HOLD_S
        if not self._ended and now - self._looked_at < LOOK_S:
            return
        settings = self._app.config.worker
        found = await self._app.store.reap(
            worker=worker,
            lease_s=settings.lease_s,
            crash_budget=settings.crash_budget,
            ended=self._ended,
        )
        self._reported |= self._ended
        # A program that a child started may hold the lock that is its sign of life. Then the store
        # sees its death only when its lease is over, and must get the exit code again.
        self._ended = {
            name: self._reported[name] for name in found.silent if name in self._reported
        }
        self._looked_at = now
        for child in self.children:
            if self._name(child) in found.silent:
                log.warning("child process %d gives no sign of life: killed", child.process.pid)
                child.process.kill()

    def _missing(self, company: Company, wanted: int) -> int:
        """Return how many children to start, so that `wanted` of them claim messages soon."""
        now = self._app.clock.monotonic()
        if self.is_stopping or now < self._held_until:
            return 0
        same = [child for child in self.children if child.company is company]
        young = sum(now - child.started_at < YOUNG_S for child in same)
        # Some places stay free for the other kind of children: a long run must not delay them.
        room = min(
            self._at_most - len(self.children),
            max(1, self._at_most - self._at_most // 5) - len(same),
        )
        return min(wanted - young, room)

    def _start(self, company: Company, starts: int, worker: Worker) -> None:
        if not any(child.company is company for child in self.children):
            together = "in small groups" if company is Company.FEW else "one at a time"
            log.warning("messages that crashed their workers run %s in child processes", together)
        now = self._app.clock.monotonic()
        for _ in range(min(starts, self._at_most - len(self.children))):
            child = Child(self._spawn(company, worker), company, now)
            self._reported.pop(self._name(child), None)  # process ids are used again
            self.children.append(child)

    def _spawn(self, company: Company, worker: Worker) -> Process:
        options = ["--company", company, "--parent", worker.as_parent, *self._options]
        try:
            if self._launcher is None:
                self._launcher = Launcher()
            return self._launcher.start([self._target, *options])
        except OSError as error:
            log.warning("no launcher, a child process is started from nothing: %s", error)
            self._launcher = None
            return spawn(self._target, options)

    def _name(self, child: Child) -> str:
        return self._app.worker_name(child.process.pid)
