"""The worker's lease: renewed from a thread of its own, given up when the loop stands still.

A blocked loop loses nothing while the thread beats; a loop that is stuck for good must not hold its
messages for ever, so the watchdog stops the beat after `stall_limit_s`. If the loop does not move
in the grace after that, either, whoever owns the process is told: nothing but its end can help.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from ackbone.core.clock import Clock
from ackbone.core.errors import AckboneError, StoreError
from ackbone.core.store import Claims, Worker

from .outages import STORE, Outages

log = logging.getLogger("ackbone.engine")

BEAT = "giving a sign of life"


class Lease:
    """Beats every third of the lease; calls `lost` (on the loop) when it was declared dead.

    `stuck` is called, from the thread, `stuck_grace_s` after the lease was given up.
    """

    def __init__(  # noqa: PLR0913 - wiring: each one is a port or a limit
        self,
        store: Claims,
        worker: Worker,
        *,
        lease_s: float,
        stall_limit_s: float,
        stuck_grace_s: float,
        clock: Clock,
        lost: Callable[[], None],
        stuck: Callable[[], NoReturn] | None = None,
        outages: Outages | None = None,
    ) -> None:
        self._store = store
        self._worker = worker
        self._every_s = lease_s / 3
        self._stall_limit_s = stall_limit_s
        self._stuck_grace_s = stuck_grace_s
        self._clock = clock
        self._lost = lost
        self._stuck = stuck
        self._outages = outages or Outages()
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._ticked = clock.monotonic()
        self._tick()
        self._thread = threading.Thread(target=self._run, name="ackbone-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._ticker.cancel()
        self._thread.join()

    def _tick(self) -> None:
        self._ticked = self._clock.monotonic()
        self._ticker = self._loop.call_later(min(1.0, self._every_s), self._tick)

    def _run(self) -> None:
        given_up = 0  # rounds of this loop ago
        pause_s = 0.0  # the first beat at once: it may have taken long to be registered
        while not self._stop.wait(pause_s):
            pause_s = self._every_s
            stalled = self._clock.monotonic() - self._ticked
            if stalled > self._stall_limit_s:
                if not given_up:
                    self._give_up(stalled)
                # In rounds: a process that was stopped (SIGSTOP) finds every clock ahead, and its
                # loop must get the whole grace to move again.
                elif self._stuck is not None and given_up * self._every_s >= self._stuck_grace_s:
                    self._stuck()
                given_up += 1
                continue  # a loop that moves again wants to know what became of its claims
            given_up = 0
            # From here on the beat is young, and the answer is about what happened before it.
            try:
                self._store.beat(self._worker)
                self._outages.worked(BEAT, STORE)
            except StoreError as error:  # its last sign of life gets older: see below
                self._outages.failed(BEAT, error)
                continue
            # Each time, though most often nothing happened: whatever made this worker look dead,
            # one that does not hear of it is refused every claim for ever.
            if not self._still_ours():
                self._call_lost()
                return

    def _give_up(self, stalled: float) -> None:
        text = "the event loop stood still for %.0f s: worker %d gives up its lease"
        if self._stuck is not None:
            text += f", and its process ends unless the loop moves within {self._stuck_grace_s:g} s"
        # In a thread of its own: the loop may stand still inside a log handler, its lock held.
        threading.Thread(
            target=log.error,
            args=(text, stalled, self._worker.worker_id),
            name="ackbone-lease-log",
            daemon=True,
        ).start()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def _still_ours(self) -> bool:
        """False: we were declared dead."""
        try:
            return self._store.is_registered(self._worker)
        except AckboneError as error:
            self._outages.failed("asking for the lease", error, asks_again=False)
            return True

    def _call_lost(self) -> None:
        log.warning(
            "worker %d gave no sign of life for longer than its lease, and was declared dead",
            self._worker.worker_id,
        )
        try:
            self._loop.call_soon_threadsafe(self._lost)
        except RuntimeError:
            return  # the loop is gone, and so is everything that it ran
