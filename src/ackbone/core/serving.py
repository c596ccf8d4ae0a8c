"""What no living worker serves: queues that nobody reads, channels that nobody has.

Nothing is reported while no worker is there at all, because then everything waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .delivery import Status
from .records import Count, QueueState, WorkerState
from .store import Offers

WAITING = (Status.PENDING, Status.QUEUED, Status.SENDING)
"""States of a reply that is still to be sent."""


def carried_by(workers: Sequence[WorkerState]) -> frozenset[str]:
    """The channels of all living workers."""
    return frozenset().union(*(each.channels for each in _offers(workers)))


def uncarried(
    replies: Iterable[Count], workers: Sequence[WorkerState], also: Iterable[str] | None = None
) -> dict[str, int]:
    """By channel, how many replies wait for a channel that no living worker has.

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
    """What to do about a channel that no living worker has."""
    if channel == "terminal":  # workers print it only where somebody looks on
        return "start 'ackbone dev' or 'ackbone chat', or reply to another channel"
    return f"write channels.{channel} into the configuration, or use App.channel"


def unserved(queues: Sequence[QueueState], workers: Sequence[WorkerState]) -> dict[str, int]:
    """By queue, how many messages wait in a queue that no living worker reads."""
    offers = _offers(workers)
    served = {name for each in offers for name in each.types}
    return {
        state.queue: state.ready
        for state in queues
        if offers and state.ready and state.queue not in served
    }


def _offers(workers: Sequence[WorkerState]) -> list[Offers]:
    """What the living workers announced."""
    return [each.offers for each in workers if each.alive and each.offers is not None]
