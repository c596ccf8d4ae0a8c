"""Acknowledging and giving back. What the server could not be told is told again."""

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

from .once import once_command
from .pending import ACK, MOVE, RELEASED, RELEASED_MS
from .wire import Wire

log = logging.getLogger("ackbone.brokers.redis")

Place = tuple[int, bytes]
"""Level and entry id."""
ACKED_AT_ONCE = 5000
"""Lua unpacks at most 8,000 values, and more may be owed while a full server takes no results."""


class Debts:
    """Settled by their holders, and the server does not know it yet."""

    def __init__(
        self, wire: Wire, keys: Mapping[int, str], group: str, consumer: str, *, delete_acked: str
    ) -> None:
        self._wire = wire
        self._keys = keys
        self._group = group
        self._consumer = consumer
        self._delete_acked = delete_acked
        self._owed: dict[Place, Settlement] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def add(self, debts: Mapping[Place, Settlement]) -> None:
        self._owed.update(debts)

    async def pay(self) -> Mapping[Place, Settlement]:
        """Tell the server of all of them; returns what it knows now."""
        owed, self._owed = self._owed, {}
        try:
            untold = await self._tell(owed)
            ack, release = Verb.ACK, Verb.RELEASE
            acked = [p for p, debt in owed.items() if debt.verb is ack]
            if untold:
                acked = [p for p in acked if p not in untold]
            released = [p for p, debt in owed.items() if debt.verb is release]
            commands = [*self._ack_commands(acked), *self.release_commands(released)]
            for answer in await self._wire.ask(*commands) if commands else ():
                if isinstance(answer, ResponseError) and "NOGROUP" not in str(answer):
                    raise self._wire.refused(answer)
        except (BrokerUnavailable, asyncio.CancelledError):
            self._owed = {**owed, **self._owed}
            raise
        if not untold:
            return owed
        return {place: debt for place, debt in owed.items() if place not in untold}

    async def _tell(self, owed: Mapping[Place, Settlement]) -> set[Place]:
        """Publish the notices; returns the entries of those that were refused.

        These stay pending. When they come back by their age, the store finds them done, keeps
        their notices until they can be told, and they go: a full server can be worked empty.
        """
        queues: dict[str, list[tuple[Place, Outgoing]]] = {}
        for place, debt in owed.items():
            for queue, out in debt.notices:
                told_there = queues.get(queue)
                if told_there is None:
                    told_there = queues[queue] = []
                told_there.append((place, out))
        if not queues:
            return set()
        commands = [once_command(q, [out for _, out in told]) for q, told in queues.items()]
        untold: set[Place] = set()
        answers = await self._wire.ask(*commands)
        for (queue, told), answer in zip(queues.items(), answers, strict=True):
            if isinstance(answer, ResponseError):
                refused = self._wire.refused(answer)
                places = {place for place, _ in told}
                if isinstance(answer, OutOfMemoryError):  # tried again, and holds up nobody else
                    self._owed = {**{place: owed[place] for place in places}, **self._owed}
                elif isinstance(refused, BrokerUnavailable):
                    raise refused
                log.error("%d results for %s are not published yet: %s", len(told), queue, refused)
                untold |= places
        return untold

    def _ack_commands(self, places: Iterable[Place]) -> list[Sequence[Any]]:
        return [
            ("EVAL", ACK, 1, self._keys[level], self._group, self._delete_acked, *some)
            for level, ids in by_level(places).items()
            for some in (ids[n : n + ACKED_AT_ONCE] for n in range(0, len(ids), ACKED_AT_ONCE))
        ]

    def extend_commands(self, places: Iterable[Place]) -> list[Sequence[Any]]:
        """Make them young again."""
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
