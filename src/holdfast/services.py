"""The relays that a worker process runs beside the engine's own."""

from __future__ import annotations

import logging
import subprocess
from typing import TYPE_CHECKING

from holdfast.core.store import Worker
from holdfast.engine.relays import Relay

if TYPE_CHECKING:
    from holdfast.app import App

log = logging.getLogger("holdfast.services")


def relays_of(app: App, *, spawn_solo: bool) -> list[Relay]:
    """What this process does beside running messages."""
    relays: list[Relay] = []
    if spawn_solo and app.target is not None:
        solo = SoloSpawner(app, app.target)
        relays.append(Relay(name="suspects", every_s=0.5, step=solo.step, role="suspects"))
    return relays


class SoloSpawner:
    """Starts the child that runs suspects alone, while there are any."""

    def __init__(self, app: App, target: str) -> None:
        self._app = app
        self._target = target
        self._child: subprocess.Popen[bytes] | None = None

    async def step(self, worker: Worker) -> None:
        from holdfast.supervisor import spawn

        if self._child is not None:
            if self._child.poll() is None:
                return
            self._child = None
        names = [sub.name for sub in self._app.subscriptions()]
        if await self._app.store.has_suspects(names):
            log.warning("a message crashed its worker twice: it runs alone in a child process now")
            self._child = spawn(self._target, ["--solo"])
