"""Replies on their way out: who may go now, and what an attempt changes, wherever they wait.

Nothing here reads or writes: a queue brings the replies and the windows, and carries out what was
chosen. All that is chosen in one write goes by one moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from . import events
from .delivery import (
    Again,
    Failed,
    Fits,
    Held,
    Limit,
    Limits,
    Outbound,
    Sent,
    Settled,
    Status,
)
from .text import storable
from .windows import Window, call_name, name_of

PAGE = 50
"""Replies that are looked at in one go, without their contents."""
ASIDE = 50
"""So many one call of `take` sets aside, about. Those that only stand in line are many at times,
and the others need not wait for all of them."""
AHEAD_US = 50_000
"""A reply is taken so long before its limits let it go, and waits for the rest at its sender's:
what taking it costs must not make every call a little later than it may be."""
ERROR_LENGTH = 1000
FREED = 1000
"""So many that were put off become due in one write, when what they waited for is over."""
EXPIRED = "it expired before it could be sent"
SENDER_DIED = "its sender died in mid-send: nobody knows whether it arrived"
AGREED = 2
"""In `in_doubt`: a person wants it sent all the same. The next doubt writes a 1 over it."""

Windows = dict[str, Window]
_decode = msgspec.json.Decoder(Window).decode
_encode = msgspec.json.Encoder().encode


class Parcel(msgspec.Struct, frozen=True):
    """A due reply, as one looks at it before it is taken: without its content."""

    reply: Outbound
    """Under the number of the call that would come next."""
    subscription: str
    lane: str | None
    is_head: bool
    """Nothing of its lane came earlier, and nothing of it is under way."""

    @property
    def task(self) -> tuple[str, str, str]:
        """Under which its events stand."""
        return self.reply.tenant_id, self.subscription, self.reply.task_id or ""


def lane_of(
    tenant_id: str, channel: str, recipient: str, conversation: str | None, priority: int
) -> str:
    """The line that a reply stands in: one conversation, one class of urgency."""
    parts = (tenant_id, channel, recipient, conversation or "", str(priority))
    text = "\x1f".join(parts).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=12).hexdigest()


# -- who may go -----------------------------------------------------------------------------------


class PutOff(NamedTuple):
    """A reply that a limit of its own holds up."""

    parcel: Parcel
    until_us: int
    """When to look again."""
    by: str | None = None
    """The window that is blocked. When somebody opens it before, the reply is due at once."""


class Choice(msgspec.Struct):
    """What becomes of a page of due replies. Those that it does not name stay as they are."""

    granted: list[Parcel] = msgspec.field(default_factory=list)
    queued: list[Parcel] = msgspec.field(default_factory=list)
    """Not their turn: looked at again when it is."""
    put_off: list[PutOff] = msgspec.field(default_factory=list)
    """A limit of theirs is reached."""
    expired: list[Parcel] = msgspec.field(default_factory=list)
    blocked_us: int | None = None
    """The whole channel waits, until then."""
    keys: set[str] = msgspec.field(default_factory=set)
    """Windows that changed."""
    is_whole_page: bool = False
    """There may be another one behind it."""

    @property
    def changes(self) -> bool:
        return bool(self.granted or self.queued or self.put_off or self.expired)

    @property
    def set_aside(self) -> int:
        """How many changed without being granted."""
        return len(self.queued) + len(self.put_off) + len(self.expired)

    @property
    def may_go_on(self) -> bool:
        """More may be due: behind the page, or because it is their turn now."""
        return self.is_whole_page or bool(self.expired)


def limits_of(page: Iterable[Parcel], limits: Limits) -> dict[str, Sequence[Limit]]:
    """By the reply's id; of those that may go, if their limits allow it."""
    return {each.reply.id: limits(each.reply) for each in page if each.is_head}


def keys_of(asked: Mapping[str, Sequence[Limit]]) -> list[str]:
    """Of the windows that have to be looked at."""
    return list(dict.fromkeys(limit.key for limits in asked.values() for limit in limits))


def choose(
    page: Sequence[Parcel],
    asked: Mapping[str, Sequence[Limit]],
    windows: Windows,
    *,
    now_us: int,
    expiry_us: int,
    room: int,
) -> Choice:
    """In the order of the page, until `room` are granted or the whole channel is at its limit.

    Calls that are granted begin in their `windows`. What expires up to `expiry_us` is over.
    """
    choice = Choice(is_whole_page=len(page) == (PAGE if room > 1 else 1))
    for parcel in page:
        if len(choice.granted) >= room:
            break
        if not parcel.is_head:
            choice.queued.append(parcel)
        elif _is_over(parcel.reply, expiry_us):
            choice.expired.append(parcel)
        else:
            _ask(choice, parcel, asked[parcel.reply.id], windows, now_us)
            if choice.blocked_us is not None:
                break
    return choice


def _ask(
    choice: Choice, parcel: Parcel, limits: Sequence[Limit], windows: Windows, now_us: int
) -> None:
    counted = [(windows.setdefault(limit.key, Window()), limit) for limit in limits]
    free = [window.free_at(limit, now_us) for window, limit in counted]
    begin = max(free, default=now_us)
    if begin <= now_us + AHEAD_US:
        for window, limit in counted:
            if limit.count is not None:
                window.begin(name_of(parcel.reply), limit, begin)
                choice.keys.add(limit.key)
        is_back = any(window.back_until > now_us for window, _ in counted)
        choice.granted.append(_after(parcel, begin - now_us, is_back=is_back))
        return
    full = [each for each, at in zip(counted, free, strict=True) if at > now_us + AHEAD_US]
    channel_wide = [(window, limit) for window, limit in full if limit.whole_channel]
    ask_at = max(window.ask_at(limit, now_us) for window, limit in channel_wide or full)
    ask_at = max(now_us + 1, ask_at - AHEAD_US)
    if channel_wide:
        choice.blocked_us = ask_at
    else:
        gate = next((limit.key for _, limit in full if limit.count is None), None)
        choice.put_off.append(PutOff(parcel, ask_at, gate))


def _after(parcel: Parcel, wait_us: int, *, is_back: bool) -> Parcel:
    if wait_us <= 0 and not is_back:
        return parcel
    wait_s = max(0, wait_us) / 1e6
    reply = msgspec.structs.replace(parcel.reply, wait_s=wait_s, is_back=is_back)
    return msgspec.structs.replace(parcel, reply=reply)


def followers(
    head: Outbound, behind: Sequence[tuple[Parcel, str]], fits: Fits, *, expiry_us: int
) -> list[Outbound]:
    """Those that go by the head's call, of what stands behind it, in order, with their contents.

    What was called for before goes alone: it may be there already, or be what its call failed of.
    """
    found: list[Outbound] = []
    for parcel, content in behind:
        reply = msgspec.structs.replace(parcel.reply, content=content)
        over = _is_over(parcel.reply, expiry_us)
        if reply.call > 1 or reply.options or over or not fits([head, *found, reply]):
            break
        found.append(reply)
    return found


def _is_over(reply: Outbound, expiry_us: int) -> bool:
    return reply.expires_us is not None and reply.expires_us <= expiry_us


def turns(levels: Mapping[str, Sequence[int]], begin: int) -> list[tuple[str, int]]:
    """Channels and priorities in the order in which they are served: the urgent of all channels
    first; among channels, another one begins each time."""
    names = list(levels)
    at = begin % len(names) if names else 0
    order = {name: n for n, name in enumerate([*names[at:], *names[:at]])}
    pairs = [(name, priority) for name, found in levels.items() for priority in found]
    return sorted(pairs, key=lambda pair: (-pair[1], order[pair[0]]))


def in_s(moments: Iterable[int], now_us: int) -> float | None:
    """Seconds until the first of them; None if there is none."""
    first = min(moments, default=None)
    return None if first is None else max(0.0, (first - now_us) / 1e6)


# -- what an attempt changes ----------------------------------------------------------------------


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a row changes when an attempt has ended, if it is still that attempt's."""

    id: str
    call: int
    status: Status
    error: str | None = None
    wait_us: int | None = None
    """It is due so long after now; None: it is not due again."""
    retries: int | None = 0
    """Added to its retries; None: they begin anew."""
    in_doubt: bool | None = None
    """None: as it was."""
    receipt: str | None = None
    """To be added; None: nothing."""
    resent: int = 0
    """Added to how often it was sent again."""

    @property
    def is_end(self) -> bool:
        """The next of its lane may go."""
        return self.status is not Status.PENDING

    @property
    def is_due(self) -> bool:
        return self.wait_us == 0


class Ended(NamedTuple):
    """The row of an attempt that was still its worker's."""

    tenant_id: str
    subscription: str
    task_id: str
    lane: str | None
    retry_count: int
    receipts: int
    """How many."""

    @property
    def task(self) -> tuple[str, str, str]:
        return self.tenant_id, self.subscription, self.task_id


def ending_of(settled: Settled) -> Ending:
    reply, result = settled.reply, settled.result
    if isinstance(result, Sent):
        named = result.more or bool(result.receipt)
        return Ending(
            id=reply.id,
            call=reply.call,
            status=Status.PENDING if result.more else Status.SENT,
            wait_us=0 if result.more else None,
            retries=None if result.more else 0,
            in_doubt=False,
            receipt=short(result.receipt) if named else None,
            resent=int(is_repeat(settled)),
        )
    error = short(result.error)
    if isinstance(result, Again):
        return Ending(
            id=reply.id,
            call=reply.call,
            status=Status.PENDING,
            error=error,
            wait_us=max(0, int(result.wait_s * 1e6)),
            retries=int(result.costs),
            in_doubt=True if result.in_doubt else None,
            resent=int(is_repeat(settled)),
        )
    if isinstance(result, Held):
        status, in_doubt = Status.UNKNOWN, True
    else:
        status, in_doubt = Status.FAILED, result.in_doubt
    return Ending(
        id=reply.id,
        call=reply.call,
        status=status,
        error=error,
        in_doubt=True if in_doubt else None,
        resent=int(is_repeat(settled)),
    )


def is_told(settled: Settled) -> bool:
    """Something happened, and there is an event of it."""
    return not isinstance(settled.result, Again) or settled.result.tried


def is_repeat(settled: Settled) -> bool:
    """It was in doubt, and this attempt may have sent it. Only the end of an attempt can tell: one
    that was refused, put off or held back sent nothing, and is no repeat."""
    result = settled.result
    if isinstance(result, Sent):
        may_have_gone = not result.seen
    elif isinstance(result, Held):
        may_have_gone = result.called
    else:
        may_have_gone = result.in_doubt
    return settled.reply.in_doubt and may_have_gone


def events_of(settled: Settled, row: Ended) -> list[events.Entry]:
    """What is told of it: that it was a repeat, and how it ended."""
    if not is_told(settled):
        return []
    told = [_event_of(settled, retry_count=row.retry_count, parts=row.receipts)]
    if is_repeat(settled):
        data = {"delivery_id": settled.reply.id, "channel": settled.reply.channel}
        told.insert(0, (events.DELIVERY_RESENT, data))
    return [(*row.task, *each) for each in told]


def _event_of(settled: Settled, *, retry_count: int, parts: int) -> tuple[str, dict[str, Any]]:
    result = settled.result
    data: dict[str, Any] = {"delivery_id": settled.reply.id, "channel": settled.reply.channel}
    if isinstance(result, Sent):
        if not result.more:
            return events.DELIVERY_SENT, data
        return events.DELIVERY_PART, {**data, "receipt": short(result.receipt), "part": parts}
    data["error"] = short(result.error)
    if isinstance(result, Again):
        data |= {"retry_count": retry_count, "wait_s": result.wait_s, "costs": result.costs}
        return events.DELIVERY_WAITING, data
    return (events.DELIVERY_FAILED if isinstance(result, Failed) else events.DELIVERY_UNKNOWN), data


def first_events(granted: Iterable[Parcel]) -> list[events.Entry]:
    """That there are those which no run made and which nobody took before: whoever wrote them down
    need not have had a number in the ledger."""
    return [
        (
            *parcel.task,
            events.DELIVERY_CREATED,
            {"delivery_id": parcel.reply.id, "channel": parcel.reply.channel},
        )
        for parcel in granted
        if parcel.reply.call == 1 and not parcel.subscription
    ]


class Orphan(NamedTuple):
    """A reply whose sender died while it was sending: a row of a dialect's look at these."""

    id: str
    call: int
    begun_us: int
    in_doubt: int
    """Before that call."""
    channel: str
    tenant_id: str
    subscription: str
    task_id: str


def calls_of(orphans: Iterable[Orphan]) -> dict[str, int]:
    """When each began, by the name that it has in the windows."""
    return {call_name(each.id, each.call): each.begun_us for each in orphans}


def orphan_events(orphan: Orphan) -> list[events.Entry]:
    """It is taken back. A repeat that nobody saw the end of may have arrived like any other."""
    task = orphan.tenant_id, orphan.subscription, orphan.task_id
    data = {"delivery_id": orphan.id, "channel": orphan.channel}
    told: list[events.Entry] = [
        (*task, events.DELIVERY_RECLAIMED, {**data, "error": SENDER_DIED}),
    ]
    if orphan.in_doubt:
        told.insert(0, (*task, events.DELIVERY_RESENT, data))
    return told


def expired_event(parcel: Parcel) -> events.Entry:
    data = {"delivery_id": parcel.reply.id, "channel": parcel.reply.channel, "error": EXPIRED}
    return (*parcel.task, events.DELIVERY_FAILED, data)


def settled_limits(
    channels: Mapping[str, Limits], batch: Iterable[Settled]
) -> list[tuple[Settled, Sequence[Limit]]]:
    """Each with those that its call counted for."""
    return [
        (each, channels[each.reply.channel](each.reply))
        if each.counts and each.reply.channel in channels
        else (each, ())
        for each in batch
    ]


def changed_keys(asked: Iterable[tuple[Settled, Sequence[Limit]]]) -> set[str]:
    """The windows that answers change: those that count, are blocked, or are free again."""
    keys = set()
    for settled, limits in asked:
        keys |= {limit.key for limit in limits if limit.count is not None}
        if settled.frees is not None:
            keys.add(settled.frees.key)
        if isinstance(settled.result, Again) and settled.result.blocks is not None:
            keys.add(settled.result.blocks.key)
    return keys


def count_answers(
    asked: Iterable[tuple[Settled, Sequence[Limit]]], windows: Windows, now_us: int
) -> None:
    """Calls that were answered count from there; whoever was told to wait blocks its place, and
    a place that was down is free when it answers."""
    for settled, limits in asked:
        _count_call(settled, limits, windows, now_us)
        if settled.frees is not None:
            windows.setdefault(settled.frees.key, Window()).unblock(now_us)
        result = settled.result
        if isinstance(result, Again) and result.blocks is not None:
            block_s = result.wait_s if result.block_s is None else result.block_s
            window = windows.setdefault(result.blocks.key, Window())
            window.block(now_us + int(block_s * 1e6))


def opened(batch: Iterable[Settled], windows: Windows, now_us: int) -> set[str]:
    """The windows that somebody opened: what was put off by them is due."""
    keys = {each.frees.key for each in batch if each.frees is not None}
    return {key for key in keys if windows[key].blocked_until <= now_us}


def _count_call(settled: Settled, limits: Sequence[Limit], windows: Windows, now_us: int) -> None:
    name, tried = name_of(settled.reply), is_told(settled)
    for limit in limits:
        if limit.count is not None:
            window = windows.setdefault(limit.key, Window())
            if tried:
                window.answered(name, limit, now_us - int(settled.ago_s * 1e6))
            else:
                window.withdrawn(name)


def give_up_calls(windows: Windows, calls: Mapping[str, int], now_us: int) -> set[str]:
    """Calls of dead senders (when each began, by name) are over; returns the windows that changed.

    There are many of both, and it happens inside a transaction: no window is asked for a call that
    is not in it.
    """
    changed = set()
    for key, window in windows.items():
        for name in window.calls.keys() & calls.keys():
            window.given_up(name, calls[name], now_us)
            changed.add(key)
    return changed


def window_of(state: str) -> Window:
    return _decode(state)


def state_of(window: Window, now_us: int) -> str:
    """As it is stored: what is over is not."""
    window.calls = {name: until for name, until in window.calls.items() if until > now_us}
    return _encode(window).decode()


def short(text: str) -> str:
    return storable(text)[:ERROR_LENGTH]
