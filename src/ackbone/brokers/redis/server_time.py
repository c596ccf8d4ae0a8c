"""Times to live, measured by the clock of the Redis server, which made the entries' ids.

The store compares an expiry with its own clock, which may be another machine's. The age of an entry
is therefore measured by the clock that made its id, and the rest of its time to live is handed over
as a time of this machine's steady clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import msgspec

from ackbone.core.broker import Delivery
from ackbone.core.clock import Clock, SystemClock

from .wire import Wire

log = logging.getLogger("ackbone.brokers.redis")

LOOK_S = 1.0
"""How often to ask the server for its time, while there are entries that expire."""
JUMP_S = 1.0
"""A larger change against the steady clock means that somebody set the server's clock."""
HOLD_S = 300.0
"""How long after a jump the age of entries is unknown. Their time to live then begins when they are
read."""


class ServerTime:
    """The difference between the server's clock and this machine's steady clock."""

    def __init__(self, wire: Wire, clock: Clock | None = None) -> None:
        self._wire = wire
        self._steady_s = (clock or SystemClock()).monotonic
        self._ahead_s: float | None = None
        self._looked_at = self._jumped_at = -math.inf

    async def look(self, deliveries: Iterable[Delivery]) -> None:
        """Ask the server for its time, if any of these deliveries expires."""
        before = self._steady_s()
        mortal = [each for each in deliveries if each.expires_at_us is not None]
        if not mortal:
            return
        # A delivery that seems expired may have come after a jump that is not known yet.
        if before - self._looked_at < LOOK_S and not any(map(self._is_over, mortal)):
            return
        (answer,) = await self._wire.ask(("TIME",))
        after = self._steady_s()
        if isinstance(answer, Exception):  # this user is not allowed to ask
            return
        seconds, micros = answer
        ahead = int(seconds) + int(micros) / 1e6 - (before + after) / 2
        if self._ahead_s is not None and abs(ahead - self._ahead_s) > JUMP_S + after - before:
            self._jumped_at = after
            log.warning(
                "the clock of the Redis server jumped by %.0f s: for the next %.0f s times to live"
                " count from the moment that a message is read",
                ahead - self._ahead_s,
                HOLD_S,
            )
        self._ahead_s, self._looked_at = ahead, after

    def timed(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Add the expiry by this machine's steady clock to the deliveries that expire."""
        return [self._timed(d) if d.expires_at_us is not None else d for d in deliveries]

    def _is_over(self, delivery: Delivery) -> bool:
        steady_s = self._timed(delivery).expires_steady_s
        return steady_s is not None and steady_s <= self._steady_s()

    def _timed(self, delivery: Delivery) -> Delivery:
        sent_us, expires_us = delivery.sent_at_us, delivery.expires_at_us
        if self._ahead_s is None or sent_us is None or expires_us is None:
            return delivery
        now = self._steady_s()
        known = now - self._jumped_at >= HOLD_S
        age_s = max(0.0, now + self._ahead_s - sent_us / 1e6) if known else 0.0
        left_s = (expires_us - sent_us) / 1e6 - age_s
        return msgspec.structs.replace(delivery, expires_steady_s=now + left_s)
