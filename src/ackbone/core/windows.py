"""Sliding windows: how many calls were made lately, to the call.

A call counts from its start until `per_s` after its answer. Whoever sends when this allows it is
never above the limit where the calls arrive, however long they are under way; a bucket that is
filled by the clock lets through what was delayed together with what comes after.
"""

from __future__ import annotations

import msgspec

from .delivery import Limit, Outbound

UNANSWERED_US = 120_000_000
"""A call whose sender vanished counts for so long, unless somebody finds out what became of it."""
NEWS_US = 120_000_000
"""So long whoever sends to a place is told that it was down and has answered somebody."""


class Window(msgspec.Struct):
    """The calls of one key that still count. Stored as JSON."""

    calls: dict[str, int] = {}
    """Until when each of them counts (µs), by `name_of`."""
    blocked_until: int = 0
    back_until: int = 0
    """Until then it is news that what it was blocked for is over."""

    def free_at(self, limit: Limit, now_us: int) -> int:
        """When the next call may begin; not after `now_us`: at once."""
        self.calls = {name: until for name, until in self.calls.items() if until > now_us}
        free = max(now_us, self.blocked_until)
        if limit.count is not None and len(self.calls) >= limit.count:
            ends = sorted(self.calls.values())
            free = max(free, ends[len(ends) - limit.count])
        return free

    def ask_at(self, limit: Limit, now_us: int) -> int:
        """When it is worth asking again: no call can begin before. Calls under way may be answered
        at once, and count no longer than `per_s` then."""
        latest = now_us + max(1, int(limit.per_s * 1e6))
        ends = sorted(min(until, latest) for until in self.calls.values() if until > now_us)
        free = max(now_us, self.blocked_until)
        if limit.count is None or len(ends) < limit.count:
            return free
        return max(free, ends[len(ends) - limit.count])

    def begin(self, name: str, limit: Limit, now_us: int) -> None:
        if limit.count is not None:
            self.calls[name] = now_us + UNANSWERED_US + int(limit.per_s * 1e6)

    def answered(self, name: str, limit: Limit, at_us: int) -> None:
        """Its answer came at this time."""
        if limit.count is not None:
            self.calls[name] = at_us + int(limit.per_s * 1e6)

    def given_up(self, name: str, begun_us: int, now_us: int) -> bool:
        """Whoever made this call is dead: it is over now, at the latest. False: it is not here."""
        until = self.calls.get(name)
        if until is None:
            return False
        per_us = until - begun_us - UNANSWERED_US
        self.calls[name] = min(until, now_us + max(0, per_us))
        return True

    @property
    def ends_at(self) -> int:
        """From then on it says nothing any more."""
        return max(self.blocked_until, self.back_until, *self.calls.values())

    def block(self, until_us: int) -> None:
        """Somebody was told to wait."""
        self.blocked_until = max(self.blocked_until, until_us)
        self.back_until = 0

    def unblock(self, now_us: int) -> None:
        """What it was blocked for is over."""
        self.blocked_until = 0
        self.back_until = now_us + NEWS_US

    def withdrawn(self, name: str) -> None:
        """This call was not made."""
        self.calls.pop(name, None)


def name_of(reply: Outbound) -> str:
    """One call for it; the next one has another name."""
    return call_name(reply.id, reply.call)


def call_name(delivery_id: str, call: int) -> str:
    return f"{delivery_id}.{call}"
