"""A breaker per handler: when everything fails, try one message at a time, not all of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Open after `failures` in a row; then one probe each `probe_s`."""

    failures: int = 5
    probe_s: float = 30.0


class Passage(StrEnum):
    """What a message may do."""

    GO = "go"
    PROBE = "probe"
    WAIT = "wait"


class Breaker:
    """Closed, or open with one probe at a time. Pure but for the clock it is given."""

    def __init__(self, policy: BreakerPolicy, monotonic: Callable[[], float]) -> None:
        self._policy = policy
        self._monotonic = monotonic
        self.in_a_row = 0
        """Failures since the last success. None: every message may run, and need not ask."""
        self._probe_at = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self.in_a_row >= self._policy.failures

    def ask(self) -> Passage:
        """May the next message run?"""
        if not self.is_open:
            return Passage.GO
        if not self.may_probe:
            return Passage.WAIT
        self._probing = True
        return Passage.PROBE

    @property
    def may_probe(self) -> bool:
        """Open, and the time for the next probe has come."""
        return self.is_open and not self._probing and self._monotonic() >= self._probe_at

    @property
    def wait_s(self) -> float:
        """How long a message that may not run should wait."""
        return max(0.05, self._probe_at - self._monotonic())

    @property
    def next_probe_s(self) -> float:
        """In how many seconds there may be another probe, if the one under way changes nothing."""
        return self._policy.probe_s if self._probing else self.wait_s

    def succeeded(self) -> bool:
        """True: this closed the breaker."""
        was_open = self.is_open
        self.in_a_row = 0
        self._probing = False
        return was_open

    def failed(self) -> bool:
        """True: this opened the breaker."""
        was_open = self.is_open
        self.in_a_row += 1
        self._probing = False
        if self.is_open:
            self._probe_at = self._monotonic() + self._policy.probe_s
        return self.is_open and not was_open

    def cancelled(self) -> None:
        """A probe ended without an answer."""
        self._probing = False
