"""Signals: a test waits for an event, not for a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE_S = 10.0
_SHOWN = 5


class SignalTimeout(AssertionError):
    """The expected event did not happen in time. The text says what happened."""


class Signal(Generic[T]):
    """Collects payloads. `wait` returns the n-th one, at once if it has already come.

    `emit` may be called from any thread and by several event loops, `wait` from any loop.
    """

    def __init__(self, name: str = "signal") -> None:
        self.name = name
        self._seen: list[T] = []
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def seen(self) -> list[T]:
        """Every payload so far, in order."""
        with self._lock:
            return list(self._seen)

    @property
    def count(self) -> int:
        return len(self._seen)

    def emit(self, payload: T) -> None:
        with self._lock:
            self._seen.append(payload)
            for loop, event in self._waiters:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

    async def wait(self, n: int = 1, *, timeout: float = PATIENCE_S) -> T:
        """Wait for the n-th payload, counted from 1 and from the beginning, and return it."""
        if n < 1:
            raise ValueError("occurrences are counted from 1")
        await self._until(lambda seen: len(seen) >= n, f"occurrence {n}", timeout)
        return self._seen[n - 1]

    async def wait_for(
        self, matches: Callable[[T], bool], *, timeout: float = PATIENCE_S, what: str = "a match"
    ) -> T:
        """Wait for the first payload, past or future, for which `matches` is true."""
        await self._until(lambda seen: any(map(matches, seen)), what, timeout)
        return next(payload for payload in self._seen if matches(payload))

    async def _until(self, done: Callable[[list[T]], bool], what: str, timeout: float) -> None:
        event = asyncio.Event()
        entry = (asyncio.get_running_loop(), event)
        with self._lock:
            self._waiters.append(entry)
        try:
            async with asyncio.timeout(timeout):
                while not done(self._seen):
                    await event.wait()
                    event.clear()
        except TimeoutError:
            raise SignalTimeout(self._report(what, timeout)) from None
        finally:
            with self._lock:
                self._waiters.remove(entry)

    def _report(self, what: str, timeout: float) -> str:
        seen = self.seen
        shown = ", ".join(repr(payload) for payload in seen[-_SHOWN:])
        last = f"; the last: {shown}" if seen else ""
        return (
            f"{self.name}: waited {timeout:g} s for {what}, which did not come; "
            f"{len(seen)} seen{last}"
        )
