"""Natural batching: items that arrive while a flush is in flight become the next flush.

There is no timer: an idle system adds no latency, and a busy one makes large batches by itself.
There is one flush at a time. Callers and flush share the interpreter's lock, so a second flush in
flight would only make both wait (measured with 64 senders on SQLite, in two halves: no faster).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class _Batch(Generic[Item, Answer]):
    """Items that are flushed together, and the futures of their callers."""

    __slots__ = ("deadlines", "futures", "items", "loop", "whole")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.items: list[Item] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.deadlines: list[float] = []
        """One for each future. Empty if the batcher has no timeout."""
        self.whole = False
        """True: the batch belongs to one caller, who gets all the answers at once."""


class Batcher(Generic[Item, Answer]):
    """Collects items and hands them to `flush` in batches; each caller gets its own answer.

    A cancelled caller does not cancel the flush: others share it. `flush` returns one answer per
    item, in order; an answer that is an exception is raised at its caller. After `timeout_s` a
    caller gets TimeoutError, but its item may still be flushed.
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
        """The last waiting batch, as long as it has room."""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Item) -> asyncio.Future[Answer]:
        """Add an item. The future is resolved when the item's batch was flushed."""
        batch = self._collecting
        if batch is None:
            batch = self._begin()
        loop = batch.loop  # asking for the running loop is a system call
        future: asyncio.Future[Answer] = loop.create_future()
        batch.items.append(item)
        batch.futures.append(future)
        if self._timeout_s is not None:
            batch.deadlines.append(loop.time() + self._timeout_s)
            if self._timer is None:  # it fired for the earlier items of this batch
                self._timer = loop.call_later(self._timeout_s, self._time_out)
        if len(batch.items) >= self._limit:
            self._collecting = None
        return future

    def add_all(self, items: Sequence[Item]) -> asyncio.Future[Sequence[Answer | BaseException]]:
        """Add a batch of its own, up to the limit. Resolved with one answer for each item."""
        batch = self._begin()
        loop = batch.loop
        future: asyncio.Future[Sequence[Answer | BaseException]] = loop.create_future()
        batch.whole = True
        batch.items.extend(items)
        batch.futures.append(future)
        if self._timeout_s is not None:
            batch.deadlines.append(loop.time() + self._timeout_s)
        self._collecting = None  # later items go into a later batch
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
        """Fail the callers whose time is over.

        One timer is enough: all callers wait equally long, so the first one times out first. An
        answer in time does not stop the timer. It fires, and is set for the next caller.
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
