"""Queues and channels that no living worker serves.

Nothing is reported while there is no living worker at all, because then everything waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .outbound.delivery import Status
from .records import Count, QueueState, WorkerState
from .store import Offers

WAITING = (Status.PENDING, Status.QUEUED, Status.SENDING)
"""States of a reply that is still to be sent."""


def carried_by(workers: Sequence[WorkerState]) -> frozenset[str]:
    """Return the channels of all living workers."""
    return frozenset().union(*(each.channels for each in _offers(workers)))


def uncarried(
    replies: Iterable[Count], workers: Sequence[WorkerState], also: Iterable[str] | None = None
) -> dict[str, int]:
    """Count the replies that wait for a channel that no living worker has, by channel.

    `also`: channels of a worker that is about to start.
    """
    if also is None and not _offers(workers):
        return {}
    known = {*carried_by(workers), *(also or ())}
    found: dict[str, int] = {}
    for each in replies:
        if each.kind in WAITING and each.queue not in known:
            found[each.queue] = found.get(each.queue, 0) + each.count
    return dict(sorted(found.items()))


def how_to_carry(channel: str) -> str:
    """Return a hint for a channel that no living worker has."""
    if channel == "terminal":  # workers print only where somebody watches
        return "start 'ackbone run' or 'ackbone dev' in a terminal, or reply to another channel"
    return f"write channels.{channel} into the configuration, or use App.channel"


def unserved(queues: Sequence[QueueState], workers: Sequence[WorkerState]) -> dict[str, int]:
    """Count the messages in queues that no living worker reads, by queue."""
    offers = _offers(workers)
    served = {name for each in offers for name in each.types}
    return {
        state.queue: state.ready
        for state in queues
        if offers and state.ready and state.queue not in served
    }


def _offers(workers: Sequence[WorkerState]) -> list[Offers]:
    """Return the offers of the living workers."""
    return [each.offers for each in workers if each.alive and each.offers is not None]
