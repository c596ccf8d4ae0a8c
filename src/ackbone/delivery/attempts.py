"""One attempt, at one reply or at several by one call: what the channel did or raised, as results
that can be stored."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ackbone.core.breaker import Breaker, Passage
from ackbone.core.delivery import (
    Again,
    Channel,
    Failed,
    Held,
    Limit,
    Outbound,
    Reconciles,
    Result,
    Sent,
    Splits,
)
from ackbone.core.errors import FinalError, RateLimited, SendUnknown

from .waits import JITTER, asked_s, compute_backoff_ms

log = logging.getLogger("ackbone.delivery")

TIMEOUT_S = 60.0
_SURE = "its channel must not repeat itself"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How attempts are made."""

    timeout_s: float = TIMEOUT_S
    """A call that takes longer is given up; whether it arrived is not known."""
    wait_scale: float = 1.0
    """Shortens the waits between attempts, for tests and for the impatient."""
    hold_unknown: bool = False
    """What may have arrived is not sent again: a person decides."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The way of one reply."""

    channel: Channel
    policy: Policy
    splits: Splits | None
    """The channel, if it is one that splits."""
    reconciles: Reconciles | None
    """The channel, if it is one that knows what arrived."""
    breaker: Breaker
    """Of its destination."""
    destination: Limit
    """Blocked while the destination is down."""
    narrowest: Limit
    """Blocked when the channel says that it was called too often."""
    widest: Limit
    """Blocked instead when that goes for all that it sends."""


class Attempted(NamedTuple):
    """What became of each, and what is free again because of it."""

    results: list[Result]
    frees: Limit | None = None


async def attempt(replies: Sequence[Outbound], merged: Outbound, route: Route) -> Attempted:
    """Make one call that sends `merged`, which says what these say, unless their destination is
    down. Raises only CancelledError."""
    breaker = route.breaker
    if breaker.is_open and any(reply.is_back for reply in replies):  # others know more than we do
        breaker.succeeded()
    if breaker.ask() is Passage.WAIT:
        # Due at once, behind the gate: when that is lifted, all of them go.
        waits = Again(
            error="its destination is down: it waits until that answers again",
            wait_s=0.0,
            costs=False,
            tried=False,
            blocks=route.destination,
            block_s=breaker.next_probe_s,
        )
        return Attempted([waits for _ in replies])
    try:
        result = await _unbroken(merged, route)
    except asyncio.CancelledError:
        breaker.cancelled()
        raise
    except RateLimited as error:  # it is there, and says so
        told_s = asked_s(error) or wait_s(1, route.policy)
        blocks = route.widest if error.whole_channel else route.narrowest
        result = Again(error=_said(error), wait_s=told_s, costs=False, blocks=blocks)
    except FinalError as error:
        result = Failed(error=_said(error))
        if len(replies) > 1:  # which of them it was shows when each goes alone
            result = Again(error=f"refused together: {_said(error)}", wait_s=0.0, costs=False)
    except Exception as error:
        if breaker.failed():
            log.error(
                "[delivery] %s is down: one call each %.0fs until it answers",
                _place(route.destination),
                breaker.next_probe_s,
            )
        return Attempted([_after_failure(reply, error, route) for reply in replies])
    results = [result for _ in replies]
    if isinstance(result, Held) and not result.called:  # nobody was asked, so nobody answered
        breaker.cancelled()
        return Attempted(results)
    if not breaker.succeeded():
        return Attempted(results)
    log.warning("[delivery] %s is back", _place(route.destination))
    return Attempted(results, frees=route.destination)


async def _unbroken(reply: Outbound, route: Route) -> Result:
    """As `_call`. What a channel cancels inside of itself is its failure, and does not end us: a
    reply of a worker that lives would be taken back by nobody."""
    try:
        return await _call(reply, route)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise SendUnknown("its channel broke the call off") from None


async def _call(reply: Outbound, route: Route) -> Result:
    policy = route.policy
    parts = _parts(reply, route.splits)
    here = len(reply.receipts)
    more = len(parts) > here + 1
    if reply.in_doubt:
        arrived = await _asked(parts[here], route)
        if arrived:
            return Sent(more=more, seen=True)
        if arrived is None and policy.hold_unknown and not reply.repeat_agreed:
            return Held(error=f"it may have arrived, and {_SURE}", called=False)
    try:
        async with asyncio.timeout(policy.timeout_s):
            receipt = await route.channel.send(parts[here])
    except TimeoutError:
        raise SendUnknown(f"no answer within {policy.timeout_s:g} s") from None
    return Sent(receipt=receipt or "", more=more)


async def _asked(reply: Outbound, route: Route) -> bool | None:
    if route.reconciles is None:
        return None
    async with asyncio.timeout(route.policy.timeout_s):
        return await route.reconciles.arrived(reply)


def _parts(reply: Outbound, channel: Splits | None) -> Sequence[Outbound]:
    found = (reply,) if channel is None else channel.parts(reply)
    if len(found) <= len(reply.receipts):
        # Somebody shortened its text after its first parts had arrived.
        raise FinalError(
            f"{len(reply.receipts)} parts arrived, and the text has only {len(found)} now:"
            " nothing is left to be sent"
        )
    return found


def _after_failure(reply: Outbound, error: Exception, route: Route) -> Result:
    policy = route.policy
    unknown = isinstance(error, SendUnknown)
    if unknown and policy.hold_unknown and route.reconciles is None:
        return Held(error=f"{_said(error)}; it may have arrived, and {_SURE}")
    count = reply.retry_count + 1
    if count > reply.max_retries:
        maybe = "; it may have arrived" if unknown or reply.in_doubt else ""
        said = f"{_said(error)}; given up after {count} attempts{maybe}"
        return Failed(error=said, in_doubt=unknown)
    is_down = route.breaker.is_open
    return Again(
        error=_said(error),
        wait_s=max(spread_s(reply, count, policy), asked_s(error)),
        in_doubt=unknown,
        blocks=route.destination if is_down else None,
        block_s=route.breaker.next_probe_s if is_down else None,
    )


def wait_s(count: int, policy: Policy) -> float:
    """The wait after so many failures."""
    return compute_backoff_ms(count) / 1000 * policy.wait_scale


def spread_s(reply: Outbound, count: int, policy: Policy) -> float:
    """The same and a little more: what failed together returns apart."""
    share = zlib.crc32(f"{reply.id}/{count}".encode()) / 0xFFFFFFFF
    return wait_s(count, policy) * (1 + JITTER * share)


def _place(destination: Limit) -> str:
    """Its gate's key, as people say it."""
    return destination.key.removesuffix(":at").replace(":at:", " at ", 1)


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
