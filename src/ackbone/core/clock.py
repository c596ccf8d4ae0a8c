"""Time as a port, so that tests can move it. Wall time is for people and due dates, not leases."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Where the engine gets its time from."""

    def now_us(self) -> int:
        """Wall clock, microseconds since 1970 (UTC)."""
        ...

    def monotonic(self) -> float:
        """Seconds that never jump; counts while the machine sleeps, alike in all processes."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        # CLOCK_BOOTTIME: one clock for every process of the machine, untouched by clock changes.
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def to_us(moment: datetime) -> int:
    """A datetime as integer microseconds; a naive one is taken as UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    delta = moment - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def from_us(us: int) -> datetime:
    """Integer microseconds as an aware datetime in UTC, exactly (no float is, from 2106 on)."""
    return _EPOCH + timedelta(microseconds=us)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST = datetime.max.replace(microsecond=0, tzinfo=UTC)
"""The last moment that every store can keep."""
