"""The worker's lease: renewed from a thread of its own, given up when the event loop is stuck.

A handler that blocks the loop for a moment does no harm, because the thread renews the lease. A
loop that is stuck for good must not keep its messages: after `stall_limit_s` the thread stops
renewing. If the loop does not move within the grace after that, only the end of the process helps.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import msgspec

from ackbone.core.clock import Clock
from ackbone.core.errors import AckboneError, StoreError
from ackbone.core.store import Claims, Worker

from .outages import STORE, Outages

log = logging.getLogger("ackbone.engine")

BEAT = "giving a sign of life"


class LeaseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a lease."""

    lease_s: float
    stall_limit_s: float
    """How long the loop may stand still before the lease is given up."""
    stuck_grace_s: float
    """How long after that the process is given up, too."""


class Lease:
    """Gives a sign of life every third of the lease. Calls `lost`, on the loop, if the worker was
    declared dead, and `stuck`, in the thread, if the loop does not move any more."""

    def __init__(
        self,
        store: Claims,
        worker: Worker,
        limits: LeaseLimits,
        *,
        clock: Clock,
        lost: Callable[[], None],
        stuck: Callable[[], NoReturn] | None = None,
        outages: Outages | None = None,
    ) -> None:
        self._store = store
        self._worker = worker
        self._limits = limits
        self._every_s = limits.lease_s / 3
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
        given_up = 0  # so many rounds of this loop ago
        pause_s = 0.0  # the first beat comes at once: registering may have taken long
        while not self._stop.wait(pause_s):
            pause_s = self._every_s
            grace_s = self._limits.stuck_grace_s
            stalled = self._clock.monotonic() - self._ticked
            if stalled > self._limits.stall_limit_s:
                if not given_up:
                    self._give_up(stalled)
                # Counted in rounds: after a SIGSTOP every clock is ahead, and the loop must get the
                # whole grace to move again.
                elif self._stuck is not None and given_up * self._every_s >= grace_s:
                    self._stuck()
                given_up += 1
                continue  # a loop that moves again must learn whether it lost its lease
            given_up = 0
            try:
                self._store.beat(self._worker)
                self._outages.worked(BEAT, STORE)
            except StoreError as error:  # the last sign of life gets older
                self._outages.failed(BEAT, error)
                continue
            # Asked each time. A worker that was declared dead and does not know it is refused every
            # claim. The beat comes first, so that the answer is about the time before it.
            if not self._still_ours():
                self._call_lost()
                return

    def _give_up(self, stalled: float) -> None:
        text = "the event loop stood still for %.0f s: worker %d gives up its lease"
        if self._stuck is not None:
            grace_s = self._limits.stuck_grace_s
            text += f", and its process ends unless the loop moves within {grace_s:g} s"
        # In a thread of its own: the loop may be stuck in a log handler, which holds a lock.
        threading.Thread(
            target=log.error,
            args=(text, stalled, self._worker.worker_id),
            name="ackbone-lease-log",
            daemon=True,
        ).start()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def _still_ours(self) -> bool:
        """Return False if this worker was declared dead."""
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
            return  # the loop is closed, and everything that it ran has ended
