"""One call of a channel, for one reply or several: what it did or raised becomes stored results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ackbone.core.breaker import Breaker, Passage
from ackbone.core.errors import FinalError, RateLimited, SendUnknown
from ackbone.core.outbound.delivery import (
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

from .backoff import asked_s, spread_s, wait_s

log = logging.getLogger("ackbone.delivery")

TIMEOUT_S = 60.0
_NO_REPEAT = "its channel must not send repeats"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How a channel's attempts are made."""

    timeout_s: float = TIMEOUT_S
    """A call that takes longer is cancelled; it is then unknown whether the reply arrived."""
    wait_scale: float = 1.0
    """Multiplies the waits between attempts."""
    hold_unknown: bool = False
    """A reply that may have arrived is not sent again until an operator decides."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The channel, the limits and the breaker for one reply."""

    channel: Channel
    policy: Policy
    splits: Splits | None
    """The channel, if it splits replies."""
    reconciles: Reconciles | None
    """The channel, if it can tell which replies arrived."""
    breaker: Breaker
    """The breaker of the destination."""
    destination: Limit
    """Blocked while the destination is down."""
    narrowest: Limit
    """Blocked when the channel says that it was called too often."""
    widest: Limit
    """Blocked instead when the channel says so of all its replies."""


class Attempted(NamedTuple):
    """The results of one call."""

    results: list[Result]
    """One for each reply."""
    frees: Limit | None = None
    """The limit of a destination that was down and answered this call."""


async def attempt(replies: Sequence[Outbound], merged: Outbound, route: Route) -> Attempted:
    """Make one call that sends `merged`, the text of all `replies`, unless their destination is
    down. Raises only CancelledError."""
    breaker = route.breaker
    if breaker.is_open and any(reply.is_back for reply in replies):  # it answered another process
        breaker.succeeded()
    if breaker.ask() is Passage.WAIT:
        # Due at once, but the limit of the destination is blocked: when it opens, all of them go.
        waits = Again(
            error="its destination is down: it waits until the destination answers again",
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
    except RateLimited as error:  # the destination works, and asks us to wait
        told_s = asked_s(error) or wait_s(1, route.policy.wait_scale)
        blocks = route.widest if error.whole_channel else route.narrowest
        result = Again(error=_said(error), wait_s=told_s, costs=False, blocks=blocks)
    except FinalError as error:
        result = Failed(error=_said(error))
        if len(replies) > 1:  # sent alone, each shows whether it was the cause
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
    if isinstance(result, Held) and not result.called:  # the destination was not called
        breaker.cancelled()
        return Attempted(results)
    if not breaker.succeeded():
        return Attempted(results)
    log.warning("[delivery] %s is back", _place(route.destination))
    return Attempted(results, frees=route.destination)


async def _unbroken(reply: Outbound, route: Route) -> Result:
    """As `_call`, but a cancellation inside the channel counts as its failure. Otherwise the reply
    would stay `sending`: nobody takes it back from a worker that is alive."""
    try:
        return await _call(reply, route)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise SendUnknown("its channel cancelled the call") from None


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
            return Held(error=f"it may have arrived, and {_NO_REPEAT}", called=False)
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
        # The text was shortened after the first parts had arrived.
        raise FinalError(
            f"{len(reply.receipts)} parts arrived, and the text has only {len(found)} now:"
            " nothing is left to send"
        )
    return found


def _after_failure(reply: Outbound, error: Exception, route: Route) -> Result:
    policy = route.policy
    unknown = isinstance(error, SendUnknown)
    if unknown and policy.hold_unknown and route.reconciles is None:
        return Held(error=f"{_said(error)}; it may have arrived, and {_NO_REPEAT}")
    count = reply.retry_count + 1
    if count > reply.max_retries:
        maybe = "; it may have arrived" if unknown or reply.in_doubt else ""
        said = f"{_said(error)}; given up after {count} attempts{maybe}"
        return Failed(error=said, in_doubt=unknown)
    is_down = route.breaker.is_open
    return Again(
        error=_said(error),
        wait_s=max(spread_s(reply.id, count, policy.wait_scale), asked_s(error)),
        in_doubt=unknown,
        blocks=route.destination if is_down else None,
        block_s=route.breaker.next_probe_s if is_down else None,
    )


def _place(destination: Limit) -> str:
    """Return the destination as the log names it."""
    return destination.key.removesuffix(":at").replace(":at:", " at ", 1)


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
