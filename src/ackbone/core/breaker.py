"""A circuit breaker for each handler: when every message fails, it runs one probe at a time."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Open after `failures` in a row, then let one probe run every `probe_s` seconds."""

    failures: int = 5
    probe_s: float = 30.0


class Passage(StrEnum):
    """The breaker's answer for the next message."""

    GO = "go"
    PROBE = "probe"
    WAIT = "wait"


class Breaker:
    """The state of one breaker: closed, or open with one probe at a time."""

    def __init__(self, policy: BreakerPolicy, monotonic: Callable[[], float]) -> None:
        self._policy = policy
        self._monotonic = monotonic
        self.in_a_row = 0
        """Failures since the last success. At 0 every message may run without asking."""
        self._probe_at = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self.in_a_row >= self._policy.failures

    def ask(self) -> Passage:
        """Decide whether the next message may run."""
        if not self.is_open:
            return Passage.GO
        if not self.may_probe:
            return Passage.WAIT
        self._probing = True
        return Passage.PROBE

    @property
    def may_probe(self) -> bool:
        """True if the breaker is open and the next probe is due."""
        return self.is_open and not self._probing and self._monotonic() >= self._probe_at

    @property
    def wait_s(self) -> float:
        """Seconds that a message should wait that may not run."""
        return max(0.05, self._probe_at - self._monotonic())

    @property
    def next_probe_s(self) -> float:
        """Seconds until the next probe may run, if the current one changes nothing."""
        return self._policy.probe_s if self._probing else self.wait_s

    def succeeded(self) -> bool:
        """Record a success. Returns True if it closed the breaker."""
        was_open = self.is_open
        self.in_a_row = 0
        self._probing = False
        return was_open

    def failed(self) -> bool:
        """Record a failure. Returns True if it opened the breaker."""
        was_open = self.is_open
        self.in_a_row += 1
        self._probing = False
        if self.is_open:
            self._probe_at = self._monotonic() + self._policy.probe_s
        return self.is_open and not was_open

    def cancelled(self) -> None:
        """Record that a probe ended without a result."""
        self._probing = False
