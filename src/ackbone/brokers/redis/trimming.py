"""Streams that grow for ever, cut by age; what a group has yet to read or to acknowledge stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from .pending import CHUNK, START, after, place_in_order
from .wire import Wire


async def trim(wire: Wire, key: str, *, older_than_s: float, by_minid: bool) -> int:
    """`by_minid`: the server has XTRIM MINID (6.2); else entries are deleted in parts."""
    groups, now = await wire.ask(("XINFO", "GROUPS", key), ("TIME",))
    if isinstance(groups, ResponseError):
        if "no such key" in str(groups):
            return 0
        raise wire.refused(groups)
    first_kept = b"%d-0" % max(0, int(now[0]) * 1000 - int(older_than_s * 1000))
    for group in groups:
        needed = await _first_needed(wire, key, group)
        first_kept = min(first_kept, needed, key=place_in_order)
    if by_minid:
        return int(await wire.ask_one("XTRIM", key, "MINID", "=", first_kept))
    return await _delete_before(wire, key, first_kept)


async def _first_needed(wire: Wire, key: str, group: Sequence[Any]) -> bytes:
    """The oldest entry that a group has not done with."""
    known = dict(zip(group[::2], group[1::2], strict=True))
    unread = after(known[b"last-delivered-id"])
    summary = await wire.ask_one("XPENDING", key, known[b"name"])
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
