"""Sliding windows: the calls of the last seconds, each counted exactly.

A call counts from its start until `per_s` after its answer. The receiver then never sees more calls
than the limit, however long they take to arrive. A token bucket would let delayed calls arrive
together with those that come after them.
"""

from __future__ import annotations

import msgspec

from .delivery import Limit, Outbound

UNANSWERED_US = 120_000_000
"""A call without an answer counts this long, unless its sender is found dead before."""
NEWS_US = 120_000_000
"""This long after a destination came back, replies are marked with `is_back`."""


class Window(msgspec.Struct):
    """The calls of one key that still count. Stored as JSON."""

    calls: dict[str, int] = {}
    """The end of each call's time in the window (µs), by `name_of`."""
    blocked_until: int = 0
    back_until: int = 0
    """Until then replies are told that their destination came back."""

    def free_at(self, limit: Limit, now_us: int) -> int:
        """Return when the next call may begin; `now_us` means at once."""
        self.calls = {name: until for name, until in self.calls.items() if until > now_us}
        free = max(now_us, self.blocked_until)
        if limit.count is not None and len(self.calls) >= limit.count:
            ends = sorted(self.calls.values())
            free = max(free, ends[len(ends) - limit.count])
        return free

    def ask_at(self, limit: Limit, now_us: int) -> int:
        """Return when to ask again: no call can begin before. Calls in progress may be answered at
        once, and then count no longer than `per_s`."""
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
        """Record the time of a call's answer."""
        if limit.count is not None:
            self.calls[name] = at_us + int(limit.per_s * 1e6)

    def given_up(self, name: str, begun_us: int, now_us: int) -> bool:
        """End a call whose sender is dead: now at the latest. False if it is not in this window."""
        until = self.calls.get(name)
        if until is None:
            return False
        per_us = until - begun_us - UNANSWERED_US
        self.calls[name] = min(until, now_us + max(0, per_us))
        return True

    @property
    def ends_at(self) -> int:
        """From this moment on the window is empty and open."""
        return max(self.blocked_until, self.back_until, *self.calls.values())

    def block(self, until_us: int) -> None:
        """Let no call begin before this moment: the destination asked to wait, or is down."""
        self.blocked_until = max(self.blocked_until, until_us)
        self.back_until = 0

    def unblock(self, now_us: int) -> None:
        """Let calls begin again: the destination answered."""
        self.blocked_until = 0
        self.back_until = now_us + NEWS_US

    def withdrawn(self, name: str) -> None:
        """Remove a call that was not made."""
        self.calls.pop(name, None)


Windows = dict[str, Window]
"""Windows by the key of their limit."""
_decode = msgspec.json.Decoder(Window).decode
_encode = msgspec.json.Encoder().encode


def window_of(state: str) -> Window:
    return _decode(state)


def state_of(window: Window, now_us: int) -> str:
    """Return a window as it is stored, without the calls that no longer count."""
    window.calls = {name: until for name, until in window.calls.items() if until > now_us}
    return _encode(window).decode()


def name_of(reply: Outbound) -> str:
    """Return the name of this call for a reply. Its next call has another one."""
    return call_name(reply.id, reply.call)


def call_name(delivery_id: str, call: int) -> str:
    return f"{delivery_id}.{call}"
