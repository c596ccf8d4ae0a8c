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

SOLO_CHILDREN = 4
"""At most so many processes for suspects."""
SOLO_PAUSE_S = 2.0
"""Before another one is started: the last one needs a moment to take its first message."""


def relays_of(app: App, *, spawn_solo: bool) -> list[Relay]:
    """What this process does beside running messages."""
    relays: list[Relay] = []
    if spawn_solo and app.target is not None:
        solo = SoloSpawner(app, app.target)
        relays.append(Relay(name="suspects", every_s=0.5, step=solo.step, role="suspects"))
    return relays


class SoloSpawner:
    """Starts the children that run suspects, one message each, while there are any.

    A kill of a busy worker makes suspects of innocents; several children keep a long one among them
    from holding up the rest.
    """

    def __init__(self, app: App, target: str) -> None:
        self._app = app
        self._target = target
        self._children: list[subprocess.Popen[bytes]] = []
        self._spawned_at = -SOLO_PAUSE_S

    async def step(self, worker: Worker) -> None:
        from holdfast.supervisor import spawn

        running = [child for child in self._children if child.poll() is None]
        ended = len(running) < len(self._children)
        self._children = running
        now = self._app.clock.monotonic()
        if len(running) >= SOLO_CHILDREN or (
            running and not ended and now - self._spawned_at < SOLO_PAUSE_S
        ):
            return
        names = [sub.name for sub in self._app.subscriptions()]
        if await self._app.store.has_suspects(names):
            log.warning("a message crashed its worker twice: it runs alone in a child process now")
            self._children.append(spawn(self._target, ["--solo"]))
            self._spawned_at = now
