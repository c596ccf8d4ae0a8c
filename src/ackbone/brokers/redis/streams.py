"""Questions about a whole stream: its unacknowledged copies, its depth, and its old entries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from redis.exceptions import ResponseError

from ackbone.core.broker import Delivery, QueueStats

from .entries import LEVELS, delivery_of, key_of
from .pending import CHUNK, COUNTED, START, UNREAD, after, pairs, place_in_order
from .wire import Wire

AT_ONCE = 100
"""Entries that `copies` reads in one call: each comes with its body."""
Info = dict[bytes, Any]
"""One group of a stream, as XINFO GROUPS describes it."""


async def _groups(wire: Wire, key: str) -> list[Info] | None:
    """Return the groups of a stream, or None if the stream does not exist."""
    (answer,) = await wire.ask(("XINFO", "GROUPS", key))
    if isinstance(answer, ResponseError):
        if "no such key" in str(answer):
            return None
        raise wire.refused(answer)
    return [pairs(each) for each in answer]


# -- copies ---------------------------------------------------------------------------------------


async def copies(wire: Wire, queue: str, group: str) -> AsyncIterator[Sequence[Delivery]]:
    """Yield the unread entries, then the pending ones, without taking them.

    An entry that is read by a consumer meanwhile moves from unread to pending, so this order
    misses none.
    """
    for level in LEVELS:
        key = key_of(queue, level)
        groups = await _groups(wire, key)
        if groups is None:
            continue
        last = {each[b"name"]: each[b"last-delivered-id"] for each in groups}
        since = after(last.get(group.encode(), START))
        while found := await wire.ask_one("XRANGE", key, since, "+", "COUNT", AT_ONCE):
            yield [delivery_of(queue, level, entry, fields, 1) for entry, fields in found]
            since = after(found[-1][0])
        if group.encode() not in last:
            continue
        since = START
        while found := await wire.ask_one("XPENDING", key, group, since, "+", AT_ONCE):
            # A pending entry may have been trimmed: its range is empty then.
            ranges = await wire.ask_all(*[("XRANGE", key, entry, entry) for entry, *_ in found])
            entries = [each for answer in ranges for each in answer]
            yield [delivery_of(queue, level, entry, fields, 1) for entry, fields in entries]
            since = after(found[-1][0])


# -- depth ----------------------------------------------------------------------------------------


async def stats_of(wire: Wire, queue: str, read_by: Collection[str]) -> QueueStats:
    """Count the unread and the pending entries of a queue.

    Only the groups of `read_by` count if any of them exists, otherwise all groups of the queue.
    """
    ready = in_flight = 0
    ages: list[float] = []
    for level in LEVELS:
        key = key_of(queue, level)
        length, groups, first, now = await wire.ask(
            ("XLEN", key),
            ("XINFO", "GROUPS", key),
            ("XRANGE", key, "-", "+", "COUNT", 1),
            ("TIME",),
        )
        if isinstance(length, int):
            found = [] if isinstance(groups, ResponseError) else [pairs(each) for each in groups]
            read = {name.encode() for name in read_by}
            ours = [each for each in found if each.get(b"name") in read] or found
            waiting, pending = await _depth(wire, key, length, ours)
            ready += waiting
            in_flight += pending
        if first and not isinstance(first, ResponseError):
            sent_ms = int(first[0][0].partition(b"-")[0])
            ages.append(max(0.0, int(now[0]) + int(now[1]) / 1e6 - sent_ms / 1e3))
    return QueueStats(
        queue=queue, ready=ready, in_flight=in_flight, oldest_age_s=max(ages, default=None)
    )


async def _depth(wire: Wire, key: str, length: int, groups: Sequence[Info]) -> tuple[int, int]:
    """Return how many entries are unread and how many are pending."""
    pending = max((group.get(b"pending") or 0 for group in groups), default=0)
    unread = max(0, length - pending)
    if unread == 0:
        return 0, pending
    # Entries that are done may still be there: other programs acknowledge and do not delete.
    lags = [await _lag(wire, key, group) for group in groups]
    most = max((unread if lag is None else lag for lag in lags), default=unread)
    return min(unread, most), pending


async def _lag(wire: Wire, key: str, group: Info) -> int | None:
    """Count the entries that the group has not read. None: more than `COUNTED`.

    Servers before 7.0 do not report it, nor does a newer one after entries were deleted.
    """
    told, last = group.get(b"lag"), group.get(b"last-delivered-id")
    if isinstance(told, int):
        return told
    if not isinstance(last, bytes):
        return None
    found = int(await wire.ask_one("EVAL", UNREAD, 1, key, after(last), COUNTED))
    return found if found < COUNTED else None


# -- trimming -------------------------------------------------------------------------------------


async def trim(wire: Wire, key: str, *, older_than_s: float, by_minid: bool) -> int:
    """Remove entries by age. Entries that a group has yet to read or to acknowledge stay.

    `by_minid`: the server has XTRIM MINID (6.2). Otherwise entries are deleted in parts.
    """
    groups = await _groups(wire, key)
    if groups is None:
        return 0
    now = await wire.ask_one("TIME")
    first_kept = b"%d-0" % max(0, int(now[0]) * 1000 - int(older_than_s * 1000))
    for group in groups:
        needed = await _first_needed(wire, key, group)
        first_kept = min(first_kept, needed, key=place_in_order)
    if by_minid:
        return int(await wire.ask_one("XTRIM", key, "MINID", "=", first_kept))
    return await _delete_before(wire, key, first_kept)


async def _first_needed(wire: Wire, key: str, group: Info) -> bytes:
    """Return the oldest id that the group has not read or not acknowledged."""
    unread = after(group[b"last-delivered-id"])
    summary = await wire.ask_one("XPENDING", key, group[b"name"])
    pending: bytes | None = summary[1]
    return unread if pending is None else min(unread, pending, key=place_in_order)


async def _delete_before(wire: Wire, key: str, first_kept: bytes) -> int:
    deleted = 0
    while True:
        found = await wire.ask_one("XRANGE", key, START, "+", "COUNT", CHUNK)
        old = [e for e, _ in found if place_in_order(e) < place_in_order(first_kept)]
        if old:
            deleted += int(await wire.ask_one("XDEL", key, *old))
        if len(old) < CHUNK:
            return deleted
