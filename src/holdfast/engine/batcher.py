"""Natural batching: what arrives while a flush is in flight becomes the next flush.

No waiting for more: an idle system adds no latency, a busy one makes large batches by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


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
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None
        # All callers wait equally long, so the first to come is the first to time out: one timer.
        self._deadlines: deque[tuple[float, asyncio.Future[Answer]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Item) -> asyncio.Future[Answer]:
        """Resolved when the item's batch was flushed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = loop.create_task(self._run(), name="holdfast-batcher")
        if self._timeout_s is not None:
            self._deadlines.append((loop.time() + self._timeout_s, future))
            if self._timer is None:
                self._timer = loop.call_later(self._timeout_s, self._time_out)
        return future

    async def drain(self) -> None:
        """Wait until everything added so far was flushed."""
        while self._task is not None:
            await asyncio.shield(self._task)
        self._forget()

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._limit], self._waiting[self._limit :]
                await self._one(batch)
        finally:
            self._task = None
            if self._waiting:  # added between the last look and now
                self._task = asyncio.create_task(self._run(), name="holdfast-batcher")

    async def _one(self, batch: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers: Sequence[Answer | BaseException] = await self._flush([i for i, _ in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} items were flushed, {len(answers)} answered")
        except BaseException as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._forget()

    def _forget(self) -> None:
        """Let go of deadlines that were met."""
        while self._deadlines and self._deadlines[0][1].done():
            self._deadlines.popleft()
        if not self._deadlines and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._deadlines:
            at, future = self._deadlines[0]
            if not future.done():
                if at > now:
                    break
                future.set_exception(TimeoutError())
            self._deadlines.popleft()
        if self._deadlines:
            self._timer = loop.call_at(self._deadlines[0][0], self._time_out)
