"""A clock that stands still until a test moves it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from ackbone.core.clock import to_us

_START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeClock:
    """Implements `core.clock.Clock`. Code that waits for a due time registers with `on_advance`."""

    def __init__(self, start: datetime = _START, *, monotonic: float = 1000.0) -> None:
        self._wall_us = to_us(start)
        self._monotonic = monotonic
        self._callbacks: list[Callable[[], None]] = []

    def now_us(self) -> int:
        return self._wall_us

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass: both clocks move forward."""
        if seconds < 0:
            raise ValueError("time does not go backwards; jump_wall() moves the wall clock alone")
        self._monotonic += seconds
        self._wall_us += round(seconds * 1_000_000)
        self._tell()

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock, forward or back. The monotonic clock stays."""
        self._wall_us += round(seconds * 1_000_000)
        self._tell()

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each move. Returns a function that removes it."""
        self._callbacks.append(callback)

        def forget() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return forget

    def _tell(self) -> None:
        for callback in tuple(self._callbacks):
            callback()
