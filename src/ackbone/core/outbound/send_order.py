"""Which outgoing replies are sent next.

Nothing here reads or writes. The store brings the due replies and the windows of their limits, and
carries out the choice. Everything that one transaction chooses is chosen for the same moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ackbone.core import events

from .delivery import Fits, Limit, Limits, Outbound

# -- windows of limits -----------------------------------------------------------------------------

UNANSWERED_US = 120_000_000
"""A call without an answer counts this long, unless its sender is found dead before."""
NEWS_US = 120_000_000
"""This long after a destination came back, replies are marked with `is_back`."""


class Window(msgspec.Struct):
    """A sliding window: the calls of one key that still count, each exactly. Stored as JSON.

    A call counts from its start until `per_s` after its answer. The receiver then never sees more
    calls than the limit, however long they take to arrive. A token bucket would let delayed calls
    arrive together with those that come after them.
    """

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
window_of = msgspec.json.Decoder(Window).decode
_encode = msgspec.json.Encoder().encode


def state_of(window: Window, now_us: int) -> str:
    """Return a window as it is stored, without the calls that no longer count."""
    window.calls = {name: until for name, until in window.calls.items() if until > now_us}
    return _encode(window).decode()


def name_of(reply: Outbound) -> str:
    """Return the name of this call for a reply. Its next call has another one."""
    return call_name(reply.id, reply.call)


def call_name(delivery_id: str, call: int) -> str:
    return f"{delivery_id}.{call}"


# -- due replies -----------------------------------------------------------------------------------

PAGE = 50
"""Replies that are looked at in one go, without their contents."""
ASIDE = 50
"""About how many replies one call of `take` sets aside. There may be many that only wait for an
earlier reply, and the others need not wait until all of those are set aside."""
AHEAD_US = 50_000
"""A reply is taken this long before its limits allow it, and its sender waits for the rest.
Otherwise the time that taking costs would make every call a little late."""
EXPIRED = "it expired before it could be sent"


class DueReply(msgspec.Struct, frozen=True):
    """A due reply before it is taken: without its content."""

    reply: Outbound
    """`call` is the number of the call that comes next."""
    subscription: str
    lane: str | None
    is_head: bool
    """No earlier reply of the lane waits, and none is being sent."""

    @property
    def task(self) -> tuple[str, str, str]:
        """The task that its events are recorded under."""
        return self.reply.tenant_id, self.subscription, self.reply.task_id or ""


def lane_of(
    tenant_id: str, channel: str, recipient: str, conversation: str | None, priority: int
) -> str:
    """Return the name of a reply's lane: replies of one conversation and priority go in order."""
    parts = (tenant_id, channel, recipient, conversation or "", str(priority))
    text = "\x1f".join(parts).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=12).hexdigest()


# -- the choice -----------------------------------------------------------------------------------


class PutOff(NamedTuple):
    """A reply whose own limit is reached."""

    due: DueReply
    until_us: int
    """When to look again."""
    by: str | None = None
    """The key of the blocked window. If it is opened earlier, the reply is due at once."""


class Choice(msgspec.Struct):
    """The decision about one page of due replies. Replies that it does not name stay unchanged."""

    granted: list[DueReply] = msgspec.field(default_factory=list)
    queued: list[DueReply] = msgspec.field(default_factory=list)
    """They wait for an earlier reply of their lane."""
    put_off: list[PutOff] = msgspec.field(default_factory=list)
    """One of their limits is reached."""
    expired: list[DueReply] = msgspec.field(default_factory=list)
    blocked_us: int | None = None
    """The whole channel waits until this moment."""
    keys: set[str] = msgspec.field(default_factory=set)
    """Keys of the windows that changed."""
    is_whole_page: bool = False
    """The page was full: there may be another one."""

    @property
    def changes(self) -> bool:
        return bool(self.granted or self.queued or self.put_off or self.expired)

    @property
    def set_aside(self) -> int:
        """Number of replies that changed without being granted."""
        return len(self.queued) + len(self.put_off) + len(self.expired)

    @property
    def may_go_on(self) -> bool:
        """More may be due: after this page, or because an expired reply made way for the next."""
        return self.is_whole_page or bool(self.expired)


def limits_of(page: Iterable[DueReply], limits: Limits) -> dict[str, Sequence[Limit]]:
    """Return the limits of the replies that are first in their lane, by the reply's id."""
    return {each.reply.id: limits(each.reply) for each in page if each.is_head}


def keys_of(asked: Mapping[str, Sequence[Limit]]) -> list[str]:
    """Return the keys of the windows that these limits are counted in."""
    return list(dict.fromkeys(limit.key for limits in asked.values() for limit in limits))


def choose(
    page: Sequence[DueReply],
    asked: Mapping[str, Sequence[Limit]],
    windows: Windows,
    *,
    now_us: int,
    expiry_us: int,
    room: int,
) -> Choice:
    """Decide in the order of the page, until `room` replies are granted or the channel is blocked.

    Granted calls are counted in `windows`. Replies that expire up to `expiry_us` are not sent.
    """
    choice = Choice(is_whole_page=len(page) == (PAGE if room > 1 else 1))
    for due in page:
        if len(choice.granted) >= room:
            break
        if not due.is_head:
            choice.queued.append(due)
        elif _is_over(due.reply, expiry_us):
            choice.expired.append(due)
        else:
            _ask(choice, due, asked[due.reply.id], windows, now_us)
            if choice.blocked_us is not None:
                break
    return choice


def _ask(
    choice: Choice, due: DueReply, limits: Sequence[Limit], windows: Windows, now_us: int
) -> None:
    counted = [(windows.setdefault(limit.key, Window()), limit) for limit in limits]
    free = [window.free_at(limit, now_us) for window, limit in counted]
    begin = max(free, default=now_us)
    if begin <= now_us + AHEAD_US:
        for window, limit in counted:
            if limit.count is not None:
                window.begin(name_of(due.reply), limit, begin)
                choice.keys.add(limit.key)
        is_back = any(window.back_until > now_us for window, _ in counted)
        choice.granted.append(_after(due, begin - now_us, is_back=is_back))
        return
    full = [each for each, at in zip(counted, free, strict=True) if at > now_us + AHEAD_US]
    channel_wide = [(window, limit) for window, limit in full if limit.whole_channel]
    ask_at = max(window.ask_at(limit, now_us) for window, limit in channel_wide or full)
    ask_at = max(now_us + 1, ask_at - AHEAD_US)
    if channel_wide:
        choice.blocked_us = ask_at
    else:
        gate = next((limit.key for _, limit in full if limit.count is None), None)
        choice.put_off.append(PutOff(due, ask_at, gate))


def _after(due: DueReply, wait_us: int, *, is_back: bool) -> DueReply:
    if wait_us <= 0 and not is_back:
        return due
    wait_s = max(0, wait_us) / 1e6
    reply = msgspec.structs.replace(due.reply, wait_s=wait_s, is_back=is_back)
    return msgspec.structs.replace(due, reply=reply)


def followers(
    head: Outbound, behind: Sequence[tuple[DueReply, str]], fits: Fits, *, expiry_us: int
) -> list[Outbound]:
    """Return the replies that go out with the head's call, in order, with their contents.

    `behind` are the next replies of the lane. One that was tried before goes alone: it may have
    arrived already, or may be the reason why its call failed.
    """
    found: list[Outbound] = []
    for due, content in behind:
        reply = msgspec.structs.replace(due.reply, content=content)
        over = _is_over(due.reply, expiry_us)
        if reply.call > 1 or reply.options or over or not fits([head, *found, reply]):
            break
        found.append(reply)
    return found


def _is_over(reply: Outbound, expiry_us: int) -> bool:
    return reply.expires_us is not None and reply.expires_us <= expiry_us


def turns(levels: Mapping[str, Sequence[int]], begin: int) -> list[tuple[str, int]]:
    """Return channels and priorities in the order in which they are served: the highest priority
    first; within a priority, each call begins with another channel."""
    names = list(levels)
    at = begin % len(names) if names else 0
    order = {name: n for n, name in enumerate([*names[at:], *names[:at]])}
    pairs = [(name, priority) for name, found in levels.items() for priority in found]
    return sorted(pairs, key=lambda pair: (-pair[1], order[pair[0]]))


def in_s(moments: Iterable[int], now_us: int) -> float | None:
    """Return the seconds until the first of these moments, or None without any."""
    first = min(moments, default=None)
    return None if first is None else max(0.0, (first - now_us) / 1e6)


# -- events ---------------------------------------------------------------------------------------


def first_events(granted: Iterable[DueReply]) -> list[events.Entry]:
    """Return `delivery.created` for replies that no run made, when they are first taken: the
    process that wrote them may have no worker id, and so no chain in the ledger."""
    return [
        (
            *due.task,
            events.DELIVERY_CREATED,
            {"delivery_id": due.reply.id, "channel": due.reply.channel},
        )
        for due in granted
        if due.reply.call == 1 and not due.subscription
    ]


def expired_event(due: DueReply) -> events.Entry:
    data = {"delivery_id": due.reply.id, "channel": due.reply.channel, "error": EXPIRED}
    return (*due.task, events.DELIVERY_FAILED, data)
