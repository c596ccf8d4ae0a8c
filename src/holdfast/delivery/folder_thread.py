"""The one thread that works on a folder. Jobs that come while it works are its next batch: each
syncs the files that it writes, and all of them share the sync of their folders."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core.errors import StoreError, StoreUnavailable

from . import whole_files

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    act: Callable[[], Any]
    undo: Callable[[Any], None] | None
    alone: bool
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.act()
        except BaseException as error:  # whoever asked for it is told
            self.error = error

    def not_synced(self, error: StoreError) -> None:
        if self.error is None and self.undo is not None:
            self.undo(self.result)
        self.error = self.error or error

    def resolve(self) -> None:
        if self.answer.cancelled():
            return
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(self.result)


class FolderThread:
    """Runs jobs one after the other, off the event loop."""

    def __init__(
        self, home: Path, changed: set[Path], *, collect: Callable[[], Callable[[], None]]
    ) -> None:
        """Jobs add the folders that they change to `changed`. After each batch `collect` is called
        in the thread; what it returns, in the event loop, before anybody is answered."""
        self._home = home
        self._changed = changed
        self._collect = collect
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []
        self._works = False
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="holdfast-folder")

    async def run(
        self,
        act: Callable[[], T],
        *,
        undo: Callable[[T], None] | None = None,
        alone: bool = True,
    ) -> T:
        """What the job returns, once it is on the disk. It runs to its end, whoever is cancelled.

        `undo`: called, in the thread, if the folder could not be synced. `alone`: nobody else
        changes what is in the folder meanwhile; who only adds to it need not ask for that.
        """
        loop = asyncio.get_running_loop()
        job = _Job(act, undo, alone, loop, loop.create_future())
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the folder is closed")
            self._jobs.append(job)
            if not self._works:
                self._works = True
                self._pool.submit(self._work)
        found: T = await job.answer
        return found

    async def close(self) -> None:
        """What was asked for is done; nothing more is taken."""
        with self._lock:
            self._closed = True
        await asyncio.to_thread(self._pool.shutdown)

    def _work(self) -> None:
        while True:
            with self._lock:
                jobs, self._jobs = self._jobs, []
                if not jobs:
                    self._works = False
                    return
            try:
                with contextlib.ExitStack() as lock:
                    if any(job.alone for job in jobs):
                        lock.enter_context(whole_files.alone(self._home))
                    tell = self._carry_out(jobs)
            except StoreError as error:  # the folder is away
                for job in jobs:
                    job.error = error
                tell = self._collect()
            self._answer(jobs, tell)

    def _carry_out(self, jobs: list[_Job]) -> Callable[[], None]:
        for job in jobs:
            job.run()
        try:
            whole_files.sync(*self._changed)
            self._changed.clear()
        except StoreError as error:  # the next batch tries it again
            for job in jobs:
                job.not_synced(error)
        return self._collect()

    def _answer(self, jobs: list[_Job], tell: Callable[[], None]) -> None:
        def told() -> None:
            tell()
            for job in jobs:
                job.resolve()

        with contextlib.suppress(RuntimeError):  # a loop that was closed meanwhile asks no more
            jobs[0].loop.call_soon_threadsafe(told)
