"""The first seconds of a worker whose predecessor crashed: few runs at a time, then more."""

from __future__ import annotations

from collections.abc import Mapping

from ackbone.core.clock import Clock
from ackbone.core.store import GROUP, Worker

from .fetcher import Slots

DOUBLE_S = 1.0


class Ramp:
    """Begins with room for a small group of all queues together, but at least one slot each.

    Doubles the slots every second until each queue has as many as configured.

    The message that killed the last process is likely to run again in this one. Few slots keep it
    from taking many other runs along.
    """

    def __init__(self, slots: Mapping[str, Slots], clock: Clock) -> None:
        self._slots = slots
        self._clock = clock
        self._full = {name: each.size for name, each in slots.items()}
        self._doubled_at = clock.monotonic()
        for each in slots.values():
            each.size = min(each.size, max(1, GROUP // len(slots)))

    async def step(self, worker: Worker) -> None:
        """Double the slots if it is time to."""
        now = self._clock.monotonic()
        if now - self._doubled_at < DOUBLE_S:
            return
        self._doubled_at = now
        for name, each in self._slots.items():
            each.widen(min(self._full[name], each.size * 2))
