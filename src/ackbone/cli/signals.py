"""What Ctrl+C and SIGTERM do to a command: they end it, and open things are closed first."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Signals:
    """Of one run of a command."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set by the first signal while the command is `gently` at work."""
        self.number: signal.Signals | None = None
        """Which one it was."""
        self._gentle = False
        self._terminated = False

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """A SIGTERM cancels the work, as Ctrl+C does; a second one ends the process at once.

        The loop is told, and cancels. An exception raised by a signal's handler would come up
        between any two steps, also in the middle of a thread's start: that thread would never end.
        """
        loop = asyncio.get_running_loop()
        working = asyncio.current_task()

        def terminate() -> None:
            if self._gentle and not self.asked.is_set():
                self._ask(signal.SIGTERM)
                return
            self._terminated = True
            loop.remove_signal_handler(signal.SIGTERM)
            if working is not None:
                working.cancel()

        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await work
        except asyncio.CancelledError:
            if self._terminated:
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    @contextmanager
    def gently(self) -> Iterator[asyncio.Event]:
        """Inside, the first Ctrl+C or SIGTERM only asks: it sets the event. The next one insists.

        For work that is done in steps, each of which is either done or not.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self.asked
            return
        loop = asyncio.get_running_loop()
        before = signal.getsignal(signal.SIGINT)

        def give_back() -> None:
            if loop.remove_signal_handler(signal.SIGINT):
                signal.signal(signal.SIGINT, before)

        def interrupt() -> None:
            give_back()
            self._ask(signal.SIGINT)

        self._gentle = True
        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield self.asked
        finally:
            self._gentle = False
            give_back()

    def _ask(self, number: signal.Signals) -> None:
        if not self.asked.is_set():
            self.number = number
            self.asked.set()
