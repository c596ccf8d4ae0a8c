"""Acknowledging and giving back. What the server could not be told is told again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis.exceptions import ResponseError

from holdfast.core.broker import Verb
from holdfast.core.errors import BrokerUnavailable

from .pending import ACK, MOVE, RELEASED, RELEASED_MS
from .wire import Wire

Place = tuple[int, bytes]
"""Level and entry id."""


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
        self._owed: dict[Place, Verb] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def add(self, verbs: Mapping[Place, Verb]) -> None:
        self._owed.update(verbs)

    async def pay(self) -> Mapping[Place, Verb]:
        """Tell the server of all of them; returns what it knows now."""
        owed, self._owed = self._owed, {}
        acked = [place for place, verb in owed.items() if verb is Verb.ACK]
        released = [place for place, verb in owed.items() if verb is Verb.RELEASE]
        try:
            commands = [*self._ack_commands(acked), *self.release_commands(released)]
            for answer in await self._wire.ask(*commands) if commands else ():
                if isinstance(answer, ResponseError) and "NOGROUP" not in str(answer):
                    raise self._wire.refused(answer)
        except (BrokerUnavailable, asyncio.CancelledError):
            self._owed = {**owed, **self._owed}
            raise
        return owed

    def _ack_commands(self, places: Iterable[Place]) -> list[Sequence[Any]]:
        return [
            ("EVAL", ACK, 1, self._keys[level], self._group, self._delete_acked, *ids)
            for level, ids in by_level(places).items()
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
    for level, entry in places:
        found.setdefault(level, []).append(entry)
    return found
