"""The copies of a subscription on the server, looked at without taking them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from redis.exceptions import ResponseError

from ackbone.core.broker import Delivery

from .entries import LEVELS, delivery_of, key_of
from .pending import START, after
from .wire import Wire

AT_ONCE = 100
"""Entries that are read at a time: each comes with its body."""


async def copies(wire: Wire, queue: str, group: str) -> AsyncIterator[Sequence[Delivery]]:
    """Unread entries, then pending ones. This order misses none that is read meanwhile."""
    for level in LEVELS:
        key = key_of(queue, level)
        (groups,) = await wire.ask(("XINFO", "GROUPS", key))
        if isinstance(groups, ResponseError):
            if "no such key" in str(groups):
                continue
            raise wire.refused(groups)  # nobody knows what is there
        known = [dict(zip(pairs[::2], pairs[1::2], strict=True)) for pairs in groups]
        last = {each[b"name"]: each[b"last-delivered-id"] for each in known}
        since = after(last.get(group.encode(), START))
        while found := await wire.ask_one("XRANGE", key, since, "+", "COUNT", AT_ONCE):
            yield [delivery_of(queue, level, entry, fields, 1) for entry, fields in found]
            since = after(found[-1][0])
        if group.encode() not in last:
            continue
        since = START
        while found := await wire.ask_one("XPENDING", key, group, since, "+", AT_ONCE):
            entries = await _entries(wire, key, [entry for entry, *_ in found])
            yield [delivery_of(queue, level, entry, fields, 1) for entry, fields in entries]
            since = after(found[-1][0])


async def _entries(wire: Wire, key: str, ids: Sequence[bytes]) -> list[tuple[bytes, list[bytes]]]:
    """Those that are still there: a pending entry may have been trimmed."""
    found = []
    for answer in await wire.ask(*[("XRANGE", key, entry, entry) for entry in ids]):
        if isinstance(answer, ResponseError):
            raise wire.refused(answer)
        found += answer
    return found
