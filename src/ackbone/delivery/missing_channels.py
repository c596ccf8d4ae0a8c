"""A warning about replies that wait because no living worker has their channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ackbone.core.events import DELIVERY_CREATED, Entry
from ackbone.core.records import Records
from ackbone.core.serving import carried_by, how_to_carry
from ackbone.core.store import Worker

log = logging.getLogger("ackbone.delivery")

LOOK_S = 60.0
"""How often the channels of other workers are checked again, in seconds."""


class MissingChannelWatch:
    """Warns once for each channel whose replies no living worker sends.

    `hear` is a listener of the store, `step` is run by a relay.
    """

    def __init__(self, records: Records, mine: frozenset[str]) -> None:
        self._records = records
        self._mine = mine
        self._others: set[str] = set()
        """Channels of this process's replies that other workers have to send."""
        self._warned: set[str] = set()
        self._bell = asyncio.Event()

    def hear(self, entries: Sequence[Entry]) -> None:
        for _, _, _, kind, data in entries:
            if kind == DELIVERY_CREATED and data["channel"] not in self._mine:
                channel = data["channel"]
                if channel not in self._others and channel not in self._warned:
                    self._others.add(channel)
                    self._bell.set()

    def subscribe(self) -> asyncio.Event:
        return self._bell

    def unsubscribe(self, event: asyncio.Event) -> None:
        """Nothing to do: the event belongs to this watch."""

    async def step(self, worker: Worker) -> None:
        if not self._others:
            return
        carried = carried_by(await self._records.workers())
        for channel in sorted(self._others - carried):
            log.warning(
                "a reply to channel %r waits, because no living worker has this channel: %s."
                " 'ackbone stats' counts such replies",
                channel,
                how_to_carry(channel),
            )
            self._others.discard(channel)
            self._warned.add(channel)
