"""Natural batching: what arrives while a flush is in flight becomes the next flush.

No timers: an idle system adds no latency, a busy one makes large batches by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Collects items and hands them to `flush` in batches; each caller gets its own answer.

    A cancelled caller does not cancel the flush: others share it. `flush` returns one answer per
    item, in order; an answer that is an exception is raised at its caller.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | BaseException]]],
        *,
        limit: int = 500,
    ) -> None:
        self._flush = flush
        self._limit = limit
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, item: Item) -> Answer:
        """Returns when the item's batch was flushed."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="holdfast-batcher")
        return await future

    async def drain(self) -> None:
        """Wait until everything added so far was flushed."""
        while self._task is not None:
            await asyncio.shield(self._task)

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
        except BaseException as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
