"""The desk of a folder: what operators see of its replies, and what they do to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.core.delivery_desk import DeliveryFilter, DeliveryRecord
from holdfast.core.errors import HoldfastError

from .desk_work import DeskWork

T = TypeVar("T")


class Run(Protocol):
    """Does a job in the thread of the folder, alone in it; answers when it is on the disk."""

    def __call__(self, job: Callable[[], T]) -> Awaitable[T]: ...


class FolderDesk:
    """`DeliveryRecords` and `DeliveryActs` on the files of a folder.

    It keeps what failed, waits or was discarded; of what was sent a folder keeps the names alone.
    """

    def __init__(self, work: DeskWork, run: Run) -> None:
        self._work = work
        self._run = run

    # -- looking ----------------------------------------------------------------------------------

    async def deliveries(self, where: DeliveryFilter, *, limit: int) -> Sequence[DeliveryRecord]:
        found = await self._run(lambda: self._work.records(where))
        return found[::-1][:limit]

    async def delivery_ids(self, where: DeliveryFilter, *, limit: int | None) -> Sequence[str]:
        found = await self._run(lambda: self._work.records(where))
        return [each.id for each in found[:limit]]

    async def deliveries_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeliveryRecord]:
        found = await self._run(lambda: self._work.named(name, tenant_id))
        return found[:limit]

    async def paused_channels(self) -> frozenset[str]:
        return await self._run(self._work.paused)

    async def acts(self) -> Sequence[dict[str, Any]]:
        """What people did here, and who: the lines of the folder's log."""
        return await self._run(self._work.acts)

    # -- acting -----------------------------------------------------------------------------------

    async def retry_deliveries(self, ids: Sequence[str]) -> Sequence[HoldfastError | None]:
        return await self._run(lambda: self._work.retry(ids))

    async def edit_delivery(self, delivery_id: str, *, content: str) -> None:
        refused = await self._run(lambda: self._work.edit(delivery_id, content))
        if refused is not None:
            raise refused

    async def discard_deliveries(
        self, ids: Sequence[str], *, reason: str
    ) -> Sequence[HoldfastError | None]:
        return await self._run(lambda: self._work.discard(ids, reason))

    async def pause_channel(self, channel: str) -> bool:
        return await self._run(lambda: self._work.pause(channel))

    async def unpause_channel(self, channel: str) -> bool:
        return await self._run(lambda: self._work.unpause(channel))
