"""Sends from a folder of replies inside an event loop, many at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType

from holdfast.core.breaker import BreakerPolicy
from holdfast.core.delivery import Channel
from holdfast.core.errors import StoreError

from .attempts import Policy
from .carrier import Carried, Carrier
from .file_deliveries import FileDeliveries
from .watched_folder import LOOK_S

log = logging.getLogger("holdfast.delivery")


class FolderSender:
    """An open folder, a carrier, and the loop that keeps it going.

        async with FolderSender(FileDeliveries("workspace/delivery-queue"), [TelegramChannel(...)]):
            ...

    It obeys the limits of its channels, sends long replies in parts and merges short ones, as an
    `App` does. Where people or other processes put files in, they are seen within two seconds.
    """

    def __init__(
        self,
        deliveries: FileDeliveries,
        channels: Sequence[Channel],
        *,
        policy: Policy | None = None,
        tenant_per_minute: int | None = None,
        breaker: BreakerPolicy | None = None,
    ) -> None:
        self.deliveries = deliveries
        self.carrier = Carrier(
            deliveries,
            [Carried(channel, policy or Policy()) for channel in channels],
            tenant_per_minute=tenant_per_minute,
            breaker=breaker,
        )
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to send. Raises StoreError if another process sends from this folder."""
        if self._task is None:
            self._stop.clear()
            await self.deliveries.open()
            self._task = asyncio.create_task(self._run(), name="holdfast folder sender")

    async def stop(self) -> None:
        """Send what is due, begin nothing that would have to wait, close folder and channels."""
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    async def wait(self) -> None:
        """Until it ends; raises what ended it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def __aenter__(self) -> FolderSender:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _run(self) -> None:
        try:
            worker = await self.deliveries.register("sender")
            bell = self.carrier.subscribe()
            stopping = asyncio.create_task(self._stop.wait())
            try:
                while not stopping.done():
                    bell.clear()
                    try:
                        await self.carrier.step(worker)
                    except StoreError as error:  # the disk is full, say: what waits goes on waiting
                        log.warning("[delivery] %s", error)
                    await _first(bell, stopping)
                await self.carrier.finish(worker)
            finally:
                stopping.cancel()
                self.carrier.unsubscribe(bell)
                await self.deliveries.leave(worker)
        except Exception:
            log.exception("[delivery] the sender of %s ended", self.deliveries.queue.queue_dir)
            raise
        finally:
            await self.deliveries.close()


async def _first(bell: asyncio.Event, stopping: asyncio.Task[object]) -> None:
    """Until it rings, until the end, or until it is time to look."""
    rung = asyncio.create_task(bell.wait())
    try:
        await asyncio.wait({rung, stopping}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        rung.cancel()
