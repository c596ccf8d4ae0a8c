"""The folder channel: writes replies into a folder, from which another program sends them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ackbone.core.errors import FinalError, InvalidMessage
from ackbone.core.message import DEFAULT_TENANT
from ackbone.core.outbound.delivery import Outbound
from ackbone.delivery.files.delivery_queue import DeliveryQueue
from ackbone.delivery.files.queued_delivery import QueuedDelivery


class FolderChannel:
    """Writes each reply into a folder, under its own id: the same reply again changes nothing.

    For the app a reply has arrived when its file is on the disk. A `DeliveryRunner`, or a program
    in another language, sends it from there.
    """

    def __init__(
        self, queue_dir: Path | str, *, name: str = "folder", channel: str | None = None
    ) -> None:
        """`channel`: the channel that the files name; the name of this channel unless given."""
        self.name = name
        self._channel = channel or name
        try:
            self._queue = DeliveryQueue(Path(queue_dir).expanduser())
        except OSError as error:
            raise ValueError(f"{queue_dir} cannot be a folder of replies: {error}") from error

    async def send(self, reply: Outbound) -> None:
        """Return when the file is on the disk. A reply that may have been written before is marked
        as one that may have arrived."""
        try:
            await asyncio.to_thread(self._queue.put, self._delivery(reply))
        except InvalidMessage as error:
            raise FinalError(str(error)) from error

    async def arrived(self, reply: Outbound) -> bool | None:
        """None if the folder does not hold the reply: it may have been sent and removed."""
        return await asyncio.to_thread(self._queue.holds, reply.id) or None

    async def close(self) -> None:
        """There is nothing to close."""

    def _delivery(self, reply: Outbound) -> QueuedDelivery:
        now = self._queue.now()
        details = {
            "tenant_id": reply.tenant_id if reply.tenant_id != DEFAULT_TENANT else None,
            "conversation": reply.conversation,
            "task_id": reply.task_id,
            "options": dict(reply.options),
        }
        return QueuedDelivery(
            id=reply.id,
            channel=self._channel,
            recipient=reply.recipient,
            content=reply.content,
            created_at=now,
            priority=int(reply.priority),
            sending_since=now if reply.in_doubt else 0.0,
            expires_at=0.0 if reply.expires_us is None else reply.expires_us / 1e6,
            extra={key: value for key, value in details.items() if value},
        )
