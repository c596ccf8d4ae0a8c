"""Settlements on their way to the server. One that did not get there is sent again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from ackbone.core.broker import Outgoing, Settlement, Verb
from ackbone.core.errors import BrokerUnavailable
from ackbone.core.task_protocol import AckWithNotices

from .once import once_command
from .pending import ACK, MOVE, RELEASED, RELEASED_MS
from .wire import Wire

log = logging.getLogger("ackbone.brokers.redis")

Place = tuple[int, bytes]
"""Level and entry id."""
ACKED_AT_ONCE = 5000
"""Entries in one ACK script. Lua unpacks at most 8,000 values, and more settlements may wait
while a full server takes no results."""


class Settlements:
    """Settlements that the server has not confirmed yet."""

    def __init__(
        self, wire: Wire, keys: Mapping[int, str], group: str, consumer: str, *, delete_acked: str
    ) -> None:
        self._wire = wire
        self._keys = keys
        self._group = group
        self._consumer = consumer
        self._delete_acked = delete_acked
        self._unsent: dict[Place, Settlement] = {}

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def add(self, batch: Mapping[Place, Settlement]) -> None:
        self._unsent.update(batch)

    async def send(self) -> Mapping[Place, Settlement]:
        """Send all of them. Returns those that the server has confirmed."""
        batch, self._unsent = self._unsent, {}
        try:
            unpublished = await self._publish(batch)
            ack, release = Verb.ACK, Verb.RELEASE
            acked = [p for p, item in batch.items() if item.verb is ack]
            if unpublished:
                acked = [p for p in acked if p not in unpublished]
            released = [p for p, item in batch.items() if item.verb is release]
            commands = [*self._ack_commands(acked), *self.release_commands(released)]
            for answer in await self._wire.ask(*commands) if commands else ():
                if isinstance(answer, ResponseError) and "NOGROUP" not in str(answer):
                    raise self._wire.refused(answer)
        except (BrokerUnavailable, asyncio.CancelledError):
            self._unsent = {**batch, **self._unsent}
            raise
        if not unpublished:
            return batch
        return {place: item for place, item in batch.items() if place not in unpublished}

    async def _publish(self, batch: Mapping[Place, Settlement]) -> set[Place]:
        """Publish the notices. Returns the entries whose notices were refused.

        Such entries stay pending. When their lease is over they are received again, and the store
        finds them done and keeps their notices for later, so that they can be acknowledged: a full
        server can be worked empty.
        """
        queues: dict[str, list[tuple[Place, Outgoing]]] = {}
        for place, item in batch.items():
            for queue, out in item.notices if isinstance(item, AckWithNotices) else ():
                notices = queues.get(queue)
                if notices is None:
                    notices = queues[queue] = []
                notices.append((place, out))
        if not queues:
            return set()
        commands = [once_command(q, [out for _, out in each]) for q, each in queues.items()]
        unpublished: set[Place] = set()
        answers = await self._wire.ask(*commands)
        for (queue, notices), answer in zip(queues.items(), answers, strict=True):
            if isinstance(answer, ResponseError):
                refused = self._wire.refused(answer)
                places = {place for place, _ in notices}
                if isinstance(answer, OutOfMemoryError):  # tried again, without blocking the rest
                    self._unsent = {**{place: batch[place] for place in places}, **self._unsent}
                elif isinstance(refused, BrokerUnavailable):
                    raise refused
                log.error("%d results for %s not published yet: %s", len(notices), queue, refused)
                unpublished |= places
        return unpublished

    def _ack_commands(self, places: Iterable[Place]) -> list[Sequence[Any]]:
        return [
            ("EVAL", ACK, 1, self._keys[level], self._group, self._delete_acked, *some)
            for level, ids in by_level(places).items()
            for some in (ids[n : n + ACKED_AT_ONCE] for n in range(0, len(ids), ACKED_AT_ONCE))
        ]

    def extend_commands(self, places: Iterable[Place]) -> list[Sequence[Any]]:
        """Reset the age of these entries, so that no other consumer takes them."""
        return [
            (*self._move(level), self._consumer, 0, *ids) for level, ids in by_level(places).items()
        ]

    def _move(self, level: int) -> Sequence[Any]:
        return ("EVAL", MOVE, 1, self._keys[level], self._group, self._consumer)

    def release_commands(self, places: Iterable[Place]) -> list[Sequence[Any]]:
        return [
            (*self._move(level), RELEASED, RELEASED_MS, *ids)
            for level, ids in by_level(places).items()
        ]


def by_level(places: Iterable[Place]) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for level, alike in groupby(places, key=itemgetter(0)):
        found.setdefault(level, []).extend([entry for _, entry in alike])
    return found
