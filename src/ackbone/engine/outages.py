"""Outages of the store and of the broker: one line when one begins, one line when it is over.

Many loops of a worker notice the same outage, each with every attempt. They report here.
"""

from __future__ import annotations

import logging
import threading

from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import (
    AckboneError,
    BrokerDenied,
    BrokerUnavailable,
    StoreDenied,
    StoreUnavailable,
)

log = logging.getLogger("ackbone.engine")

STORE, BROKER = "store", "broker"


class _Outage:
    """One side that is unavailable: since when, and for which callers that ask again and again."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.waiting: set[str] = set()
        self.denied = False
        """The server answers and refuses the login: somebody has to act, so that is told, too."""


class Outages:
    """What is unavailable for one worker. Called from the loop and from the lease's thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._away: dict[str, _Outage] = {}
        self._lock = threading.Lock()

    def failed(self, caller: str, error: AckboneError, *, asks_again: bool = True) -> None:
        """A call failed. Errors that do not mean "unavailable" are logged as they are.

        `asks_again`: the caller repeats the call until it succeeds and then says `worked`. The
        outage is not over before all of those callers got through: a full disk can still be read.
        """
        if isinstance(error, StoreUnavailable):
            side = STORE
        elif isinstance(error, BrokerUnavailable):
            side = BROKER
        else:
            log.warning("%s: %s", caller, error)
            return
        denied = isinstance(error, StoreDenied | BrokerDenied)
        with self._lock:
            outage = self._away.get(side)
            news = outage is None or (denied and not outage.denied)
            if outage is None:
                outage = self._away[side] = _Outage(self._clock.monotonic())
            outage.denied = outage.denied or denied
            if asks_again:
                outage.waiting.add(caller)
        if news:
            log.warning("the %s is unavailable: %s; trying until it is back", side, error)
        else:
            log.debug("%s: %s", caller, error)

    def worked(self, caller: str, side: str) -> None:
        """A call succeeded, of a caller that asks again. `side`: what it surely has spoken to."""
        if not self._away:  # nearly always, and asked with every batch
            return
        over: list[tuple[str, float]] = []
        with self._lock:
            for name, outage in list(self._away.items()):
                if name != side and caller not in outage.waiting:
                    continue
                outage.waiting.discard(caller)
                if not outage.waiting:
                    del self._away[name]
                    over.append((name, self._clock.monotonic() - outage.since))
        for name, seconds in over:
            log.warning("the %s is back after %.1f s", name, seconds)
