"""The terminal channel: replies are printed where the agent runs."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence

from holdfast.core.delivery import Deliveries, Outbound
from holdfast.core.store import Worker
from holdfast.core.text import lines, one_line

log = logging.getLogger("holdfast.delivery")

CHANNEL = "terminal"
BATCH = 100


def to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Terminal:
    """Prints pending replies, oldest first, each at least once. Run it under the role `terminal`.

    A reply is marked before it is printed and again after: one that a crash caught in between is
    printed once more by whoever comes next.
    """

    def __init__(self, deliveries: Deliveries, *, write: Callable[[str], None] = to_stdout) -> None:
        self._deliveries = deliveries
        self._write = write
        self._recovered_as: int | None = None

    async def due(self) -> bool:
        return self._recovered_as is None or await self._deliveries.waiting(CHANNEL)

    async def step(self, worker: Worker) -> int:
        """Print everything that is pending; returns how many replies that were."""
        if self._recovered_as != worker.worker_id:
            await self._deliveries.recover(CHANNEL, worker=worker)
            self._recovered_as = worker.worker_id
        printed = 0
        while batch := await self._deliveries.take(CHANNEL, limit=BATCH, worker=worker):
            if not await self._print(batch, worker):
                break
            printed += len(batch)
        return printed

    async def _print(self, batch: Sequence[Outbound], worker: Worker) -> bool:
        ids = [reply.id for reply in batch]
        text = "".join(
            f"[reply] to {one_line(reply.recipient)}: {lines(reply.content)}\n" for reply in batch
        )
        try:
            # In a thread: a terminal that was stopped with Ctrl-S must not stop the worker.
            await asyncio.to_thread(self._write, text)
        except (OSError, ValueError) as error:
            log.warning("%d replies cannot be printed: %s", len(batch), error)
            await self._deliveries.give_back(ids, worker=worker, error=str(error))
            return False
        await self._deliveries.sent(ids, worker=worker)
        return True
