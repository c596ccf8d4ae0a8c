"""The clock port, so that tests can move time. Leases never depend on the wall clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The source of time."""

    def now_us(self) -> int:
        """Return the wall clock in microseconds since 1970 (UTC)."""

    def monotonic(self) -> float:
        """Return seconds that never jump, count while the machine sleeps, and agree in all
        processes."""


class SystemClock:
    """The machine's clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        # CLOCK_BOOTTIME: one clock for all processes of the machine. Setting the time does not
        # change it.
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def to_us(moment: datetime) -> int:
    """Return a datetime as integer microseconds. One without a zone is UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    delta = moment - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def from_us(us: int) -> datetime:
    """Return integer microseconds as a datetime in UTC. Floats would not be exact after 2106."""
    return _EPOCH + timedelta(microseconds=us)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST = datetime.max.replace(microsecond=0, tzinfo=UTC)
"""The last time that every store can keep."""
