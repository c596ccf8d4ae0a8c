"""The output of `ackbone chat`: replies, announcements of new ones, and log lines about them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ackbone.core.errors import AckboneError, RateLimited, TemporaryError
from ackbone.core.outbound.delivery import Deliveries, Fits, Limits, Outbound, Taken
from ackbone.core.outbound.delivery_records import DeliveryFilter, DeliveryRecord, DeliveryRecords
from ackbone.core.store import Worker
from ackbone.core.text import lines, one_line
from ackbone.delivery.channels.reply_text import marked
from ackbone.delivery.channels.terminal_channel import CHANNEL, GONE_S
from ackbone.observe.logs import Redaction, make_handler

from .chat_screen import Screen

NAME = "Agent > "
DELIVERY = "ackbone.delivery"
"""The logger of deliveries, whose lines go to the screen."""
LOOK = 100
"""The number of latest replies in which new ones are looked for."""


class ChatChannel:
    """Prints replies on the screen; the next `failures` attempts fail."""

    name = CHANNEL

    def __init__(self, screen: Screen) -> None:
        self.failures = 0
        self._screen = screen

    async def send(self, reply: Outbound) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise TemporaryError("simulated failure")
        text = marked(reply).content
        record = {"reply": {"id": reply.id, "to": one_line(reply.recipient), "content": text}}
        shown = self._screen.show(f"{NAME}{lines(text, ' ' * len(NAME))}", record)
        try:
            await asyncio.wrap_future(shown)
        except (OSError, ValueError) as error:
            raise RateLimited(f"it cannot be printed: {error}", retry_after_s=GONE_S) from error

    async def close(self) -> None:
        pass


class AnnouncedDeliveries:
    """Deliveries that announce each new reply before its first attempt."""

    def __init__(
        self,
        inner: Deliveries,
        records: DeliveryRecords,
        announce: Callable[[DeliveryRecord], None],
    ) -> None:
        self._inner = inner
        self._records = records
        self._announce = announce
        self._known: set[str] = set()

    async def begin(self) -> None:
        """Remember the replies that exist now, so that they are not announced."""
        self._known.update(each.id for each in await self._newest())

    async def take(self, channels: Mapping[str, Limits], *, limit: int, worker: Worker) -> Taken:
        taken = await self._inner.take(channels, limit=limit, worker=worker)
        await self._tell()
        return taken

    async def follow(
        self, head: Outbound, fits: Fits, *, limit: int, worker: Worker
    ) -> Sequence[Outbound]:
        found = await self._inner.follow(head, fits, limit=limit, worker=worker)
        if found:
            await self._tell()
        return found

    async def _tell(self) -> None:
        # The replies that were taken must be sent even if they cannot be announced.
        with contextlib.suppress(AckboneError):
            for record in reversed(await self._newest()):
                if record.id not in self._known:
                    self._known.add(record.id)
                    self._announce(record)

    async def _newest(self) -> Sequence[DeliveryRecord]:
        return await self._records.deliveries(DeliveryFilter(), limit=LOOK)

    def __getattr__(self, name: str) -> Any:
        """Everything else is done by the deliveries themselves."""
        return getattr(self._inner, name)


class ScreenLines(logging.Handler):
    """Shows the text of log records on the screen."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen
        self.addFilter(Redaction())

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.show(one_line(record.getMessage()))


@contextlib.contextmanager
def chat_logs(screen: Screen, path: Path, level: str) -> Iterator[None]:
    """Set up logging for a chat; `level` is the level of the file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    root, delivery = logging.getLogger(), logging.getLogger(DELIVERY)
    with os.fdopen(fd, "a", encoding="utf-8") as file:
        kept = make_handler(file, "text")
        kept.setLevel(level.upper())
        shown = ScreenLines(screen)
        before = root.level, delivery.level
        root.addHandler(kept)
        root.setLevel(level.upper())
        delivery.addHandler(shown)
        delivery.setLevel(logging.DEBUG)  # a reply that was sent is a line at this level
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.removeHandler(kept)
            delivery.removeHandler(shown)
            root.setLevel(before[0])
            delivery.setLevel(before[1])
