"""Event loops and threads: a thread beside a loop, a loop in a thread, a lock for each loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def beside_the_loop(work: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, but in a daemon thread, which does not keep the process from ending.

    Only for work that may be cut off at any point.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, raised = None, None
        try:
            result = work()
        except BaseException as error:
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(resolve, result, raised)

    threading.Thread(target=run, name="ackbone-beside", daemon=True).start()
    return await future


class LoopLock:
    """A lock among the tasks of a loop, for an object that outlives its loop. An `asyncio.Lock`
    belongs to one loop as soon as a task has waited for it."""

    def __init__(self) -> None:
        self._made: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def here(self) -> asyncio.Lock:
        """Return the lock of the running loop."""
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = loop, asyncio.Lock()
        return self._made[1]


class LoopThread:
    """An event loop in a thread, for callers without one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ackbone-sync", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
