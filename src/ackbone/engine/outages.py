"""Outages of the store and of brokers: one log line when one begins, one when it is over.

All loops of a worker notice the same outage at each of their attempts. They report it here.
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
DEFAULT = "default"
"""Name of the broker in a configuration that has one."""


def broker_side(name: str) -> str:
    """Return what a broker is called in the log, by its name in the configuration."""
    return BROKER if name == DEFAULT else f"{BROKER} {name}"


def _the(side: str) -> str:
    return f"the {side}" if side in (STORE, BROKER) else side


class _Outage:
    """The store or the broker being unavailable: since when, and which callers keep asking."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.waiting: set[str] = set()
        self.denied = False
        """The server answers and refuses the login. That is logged too: an operator has to act."""


class Outages:
    """The outages that one worker sees. Called from the loop and from the lease's thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._away: dict[str, _Outage] = {}
        self._lock = threading.Lock()

    def failed(
        self, caller: str, error: AckboneError, *, asks_again: bool = True, broker: str = BROKER
    ) -> None:
        """Report a failed call. Errors that do not mean "unavailable" are logged as they are.

        `broker`: what the broker is called that was asked, if one was (`broker_side`).
        `asks_again`: the caller repeats the call until it succeeds, then calls `worked`. The outage
        is over when all such callers have succeeded: a full disk can still be read.
        """
        if isinstance(error, StoreUnavailable):
            side = STORE
        elif isinstance(error, BrokerUnavailable):
            side = broker
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
            log.warning("%s is unavailable: %s; trying until it is back", _the(side), error)
        else:
            log.debug("%s: %s", caller, error)

    def worked(self, caller: str, side: str) -> None:
        """Report that a caller that asks again has succeeded. `side`: the store or a broker,
        whichever has certainly answered it."""
        if not self._away:  # the usual case, checked with every batch
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
            log.warning("%s is back after %.1f s", _the(name), seconds)
