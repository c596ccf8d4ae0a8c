"""Ctrl+C and SIGTERM end a command, after it has closed what it opened."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Signals:
    """The signals during one execution of a command."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set by the first signal inside `gently`."""
        self.number: signal.Signals | None = None
        """The signal that set `asked`."""
        self._gentle = False
        self._terminated = False

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work. SIGTERM cancels it, as Ctrl+C does; a second one ends the process at once.

        The signal is handled by the event loop. An exception raised in a signal handler could
        surface anywhere, also during the start of a thread, which would then never end.
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
        """Inside, the first Ctrl+C or SIGTERM only sets the event. The next one ends the command.

        For work in steps, each of which is either done or not.
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
