"""The folder channel: replies are handed to a folder, and whoever sends from it carries them on."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.delivery import Outbound
from holdfast.core.errors import FinalError, InvalidMessage

from .file_deliveries import FileDeliveries


class FolderChannel:
    """Puts each reply into a folder, under its own id: the same one again changes nothing.

    It has arrived when it is on the disk. What becomes of it then is known to whoever sends from
    the folder: a `DeliveryRunner`, a `FolderSender`, or a program of another kind.
    """

    def __init__(
        self, queue_dir: Path | str, *, name: str = "folder", channel: str | None = None
    ) -> None:
        """`channel`: what the files say that they are for; None: the channel's own name."""
        self.name = name
        self._channel = channel or name
        try:
            self._deliveries = FileDeliveries(Path(queue_dir).expanduser())
        except OSError as error:
            raise ValueError(f"{queue_dir} cannot be a folder of replies: {error}") from error

    async def send(self, reply: Outbound) -> None:
        """Returns when it is on the disk; one that may have been there before is marked so."""
        try:
            await self._deliveries.hand_on(reply, channel=self._channel)
        except InvalidMessage as error:
            raise FinalError(str(error)) from error

    async def arrived(self, reply: Outbound) -> bool | None:
        """A runner does not say what it sent: what is not to be found may have been there."""
        return await self._deliveries.holds(reply.id) or None

    async def close(self) -> None:
        await self._deliveries.close()
