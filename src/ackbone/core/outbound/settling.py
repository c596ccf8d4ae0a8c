"""The end of an attempt: what it changes in the row, the ledger and the windows of limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ackbone.core import events
from ackbone.core.text import storable

from .delivery import Again, Failed, Held, Limit, Limits, Sent, Settled, Status
from .send_order import Window, Windows, call_name, name_of

ERROR_LENGTH = 1000
FREED = 1000
"""Replies that were put off become due in portions of this size when their limit is free again."""
SENDER_DIED = "its sender died in mid-send: nobody knows whether it arrived"
AGREED = 2
"""Value of `in_doubt` when an operator wants the reply sent again. The next doubt overwrites it
with 1."""


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The change of a row at the end of an attempt. It applies only while the row is `sending` by
    the same call."""

    id: str
    call: int
    status: Status
    error: str | None = None
    wait_us: int | None = None
    """Microseconds until it is due again; None: never."""
    retries: int | None = 0
    """Added to `retry_count`; None sets it back to 0."""
    in_doubt: bool | None = None
    """None: unchanged."""
    receipt: str | None = None
    """Appended to the receipts; None: nothing is."""
    resent: int = 0
    """Added to `resent`."""

    @property
    def is_end(self) -> bool:
        """True if the next reply of the lane may be sent."""
        return self.status is not Status.PENDING

    @property
    def is_due(self) -> bool:
        return self.wait_us == 0


class EndedRow(NamedTuple):
    """Columns of a row that an `AttemptEnd` has changed."""

    tenant_id: str
    subscription: str
    task_id: str
    lane: str | None
    retry_count: int
    receipts: int
    """The number of them."""

    @property
    def task(self) -> tuple[str, str, str]:
        return self.tenant_id, self.subscription, self.task_id


def attempt_end(settled: Settled) -> AttemptEnd:
    reply, result = settled.reply, settled.result
    if isinstance(result, Sent):
        named = result.more or bool(result.receipt)
        return AttemptEnd(
            id=reply.id,
            call=reply.call,
            status=Status.PENDING if result.more else Status.SENT,
            wait_us=0 if result.more else None,
            retries=None if result.more else 0,
            in_doubt=False,
            receipt=_short(result.receipt) if named else None,
            resent=int(is_repeat(settled)),
        )
    error = _short(result.error)
    if isinstance(result, Again):
        return AttemptEnd(
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
    return AttemptEnd(
        id=reply.id,
        call=reply.call,
        status=status,
        error=error,
        in_doubt=True if in_doubt else None,
        resent=int(is_repeat(settled)),
    )


def was_tried(settled: Settled) -> bool:
    """Return True if the channel was called. Only then is there an event."""
    return not isinstance(settled.result, Again) or settled.result.tried


def is_repeat(settled: Settled) -> bool:
    """Return True if the reply was in doubt and this attempt may have sent it once more. An attempt
    that was refused, put off or held back sent nothing, so it is not a repeat."""
    result = settled.result
    if isinstance(result, Sent):
        may_have_gone = not result.seen
    elif isinstance(result, Held):
        may_have_gone = result.called
    else:
        may_have_gone = result.in_doubt
    return settled.reply.in_doubt and may_have_gone


def events_of(settled: Settled, row: EndedRow) -> list[events.Entry]:
    """Return the events of an attempt: whether it was a repeat, and how it ended."""
    if not was_tried(settled):
        return []
    found = [_event_of(settled, retry_count=row.retry_count, parts=row.receipts)]
    if is_repeat(settled):
        data = {"delivery_id": settled.reply.id, "channel": settled.reply.channel}
        found.insert(0, (events.DELIVERY_RESENT, data))
    return [(*row.task, *each) for each in found]


def _event_of(settled: Settled, *, retry_count: int, parts: int) -> tuple[str, dict[str, Any]]:
    result = settled.result
    data: dict[str, Any] = {"delivery_id": settled.reply.id, "channel": settled.reply.channel}
    if isinstance(result, Sent):
        if not result.more:
            return events.DELIVERY_SENT, data
        return events.DELIVERY_PART, {**data, "receipt": _short(result.receipt), "part": parts}
    data["error"] = _short(result.error)
    if isinstance(result, Again):
        data |= {"retry_count": retry_count, "wait_s": result.wait_s, "costs": result.costs}
        return events.DELIVERY_WAITING, data
    return (events.DELIVERY_FAILED if isinstance(result, Failed) else events.DELIVERY_UNKNOWN), data


# -- replies whose sender died --------------------------------------------------------------------


class Orphan(NamedTuple):
    """A reply whose sender died while it was sending, in the order of the statement's columns."""

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
    """Return when each call began, by its name in the windows."""
    return {call_name(each.id, each.call): each.begun_us for each in orphans}


def orphan_events(orphan: Orphan) -> list[events.Entry]:
    """Return the events of taking a reply back. If it was in doubt before, the call of the dead
    sender may have repeated it."""
    task = orphan.tenant_id, orphan.subscription, orphan.task_id
    data = {"delivery_id": orphan.id, "channel": orphan.channel}
    found: list[events.Entry] = [
        (*task, events.DELIVERY_RECLAIMED, {**data, "error": SENDER_DIED}),
    ]
    if orphan.in_doubt:
        found.insert(0, (*task, events.DELIVERY_RESENT, data))
    return found


def give_up_calls(windows: Windows, calls: Mapping[str, int], now_us: int) -> set[str]:
    """End the calls of dead senders (when each began, by name); return the keys that changed.

    There are many windows and many calls, and it happens inside a transaction: only windows that
    contain one of the calls are touched.
    """
    changed = set()
    for key, window in windows.items():
        for name in window.calls.keys() & calls.keys():
            window.given_up(name, calls[name], now_us)
            changed.add(key)
    return changed


# -- windows of limits ----------------------------------------------------------------------------
def settled_limits(
    channels: Mapping[str, Limits], batch: Iterable[Settled]
) -> list[tuple[Settled, Sequence[Limit]]]:
    """Return each attempt with the limits that its call counts for."""
    return [
        (each, channels[each.reply.channel](each.reply))
        if each.counts and each.reply.channel in channels
        else (each, ())
        for each in batch
    ]


def changed_keys(asked: Iterable[tuple[Settled, Sequence[Limit]]]) -> set[str]:
    """Return the keys of the windows that answers change: they count, block or open them."""
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
    """Count answered calls from the time of their answer. A request to wait blocks its window; a
    destination that answers again opens it."""
    for settled, limits in asked:
        _count_call(settled, limits, windows, now_us)
        if settled.frees is not None:
            windows.setdefault(settled.frees.key, Window()).unblock(now_us)
        result = settled.result
        if isinstance(result, Again) and result.blocks is not None:
            block_s = result.wait_s if result.block_s is None else result.block_s
            window = windows.setdefault(result.blocks.key, Window())
            window.block(now_us + int(block_s * 1e6))


def opened_windows(batch: Iterable[Settled], windows: Windows, now_us: int) -> set[str]:
    """Return the keys of windows that were opened: replies that they put off are due."""
    keys = {each.frees.key for each in batch if each.frees is not None}
    return {key for key in keys if windows[key].blocked_until <= now_us}


def _count_call(settled: Settled, limits: Sequence[Limit], windows: Windows, now_us: int) -> None:
    name, tried = name_of(settled.reply), was_tried(settled)
    for limit in limits:
        if limit.count is not None:
            window = windows.setdefault(limit.key, Window())
            if tried:
                window.answered(name, limit, now_us - int(settled.ago_s * 1e6))
            else:
                window.withdrawn(name)


def _short(text: str) -> str:
    return storable(text)[:ERROR_LENGTH]
