"""Natural batching: what arrives while a flush is in flight becomes the next flush.

No waiting for more: an idle system adds no latency, a busy one makes large batches by itself.
One flush at a time: where callers and flush share the interpreter's lock, a second one in flight
only makes each wait for the other (64 senders on SQLite, in two halves: no faster).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class _Batch(Generic[Item, Answer]):
    """Items that are flushed together, with those who wait for them."""

    __slots__ = ("deadlines", "futures", "items", "loop", "whole")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.items: list[Item] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.deadlines: list[float] = []
        """One for each future, or none at all where nobody times out."""
        self.whole = False
        """All of it is one caller's, who gets all the answers at once."""


class Batcher(Generic[Item, Answer]):
    """Collects items and hands them to `flush` in batches; each caller gets its own answer.

    A cancelled caller does not cancel the flush: others share it. `flush` returns one answer per
    item, in order; an answer that is an exception is raised at its caller. With `timeout_s` a
    caller gets TimeoutError after so long; what it asked for may still happen.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | BaseException]]],
        *,
        limit: int = 500,
        timeout_s: float | None = None,
    ) -> None:
        self._flush = flush
        self._limit = limit
        self._timeout_s = timeout_s
        self._in_flight: _Batch[Item, Answer] | None = None
        self._waiting: deque[_Batch[Item, Answer]] = deque()
        self._collecting: _Batch[Item, Answer] | None = None
        """The last of those that wait, as long as it takes more."""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Item) -> asyncio.Future[Answer]:
        """Resolved when the item's batch was flushed."""
        batch = self._collecting
        if batch is None:
            batch = self._begin()
        loop = batch.loop  # asking which one runs is a system call
        future: asyncio.Future[Answer] = loop.create_future()
        batch.items.append(item)
        batch.futures.append(future)
        if self._timeout_s is not None:
            batch.deadlines.append(loop.time() + self._timeout_s)
            if self._timer is None:  # it rang for all others of the batch
                self._timer = loop.call_later(self._timeout_s, self._time_out)
        if len(batch.items) >= self._limit:
            self._collecting = None
        return future

    def add_all(self, items: Sequence[Item]) -> asyncio.Future[Sequence[Answer | BaseException]]:
        """A batch of the caller's own, up to the limit; resolved with one answer for each item."""
        batch = self._begin()
        loop = batch.loop
        future: asyncio.Future[Sequence[Answer | BaseException]] = loop.create_future()
        batch.whole = True
        batch.items.extend(items)
        batch.futures.append(future)
        if self._timeout_s is not None:
            batch.deadlines.append(loop.time() + self._timeout_s)
        self._collecting = None  # what comes later is flushed later
        return future

    async def drain(self) -> None:
        """Wait until everything added so far was flushed."""
        while self._task is not None:
            await asyncio.shield(self._task)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> _Batch[Item, Answer]:
        loop = asyncio.get_running_loop()
        batch: _Batch[Item, Answer] = _Batch(loop)
        self._collecting = batch
        self._waiting.append(batch)
        if self._task is None:
            self._task = loop.create_task(self._run(), name="ackbone-batcher")
        if self._timer is None and self._timeout_s is not None:
            self._timer = loop.call_later(self._timeout_s, self._time_out)
        return batch

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch = self._in_flight = self._waiting.popleft()
                if batch is self._collecting:
                    self._collecting = None
                await self._one(batch)
        finally:
            self._in_flight = self._task = None
            if self._waiting:  # added between the last look and now
                self._task = asyncio.create_task(self._run(), name="ackbone-batcher")

    async def _one(self, batch: _Batch[Item, Answer]) -> None:
        items = batch.items
        answers: Sequence[Any]
        try:
            answers = await self._flush(items)
            if len(answers) != len(items):
                raise RuntimeError(f"{len(items)} items were flushed, {len(answers)} answered")
            if batch.whole:
                answers = [answers]
        except BaseException as error:
            answers = [error] * len(batch.futures)
        for future, answer in zip(batch.futures, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _time_out(self) -> None:
        """All callers wait equally long, so the first to come is the first to time out: one timer.

        It is left alone when answers come in time, and looks then for whom it should ring next.
        """
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        batches = list(self._waiting)
        if self._in_flight is not None:
            batches.insert(0, self._in_flight)
        for batch in batches:
            for future, deadline in zip(batch.futures, batch.deadlines, strict=True):
                if future.done():
                    continue
                if deadline > now:
                    self._timer = loop.call_at(deadline, self._time_out)
                    return
                future.set_exception(TimeoutError())
