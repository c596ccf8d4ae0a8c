"""Take: receive and claim in one transaction, if the broker's queue is in the store's database.

Taking a message deletes it from the queue and writes it, body and all, into its task row. There is
no second copy afterwards, so nothing has to be settled, redelivered or reclaimed.
"""

from __future__ import annotations

from ackbone.core.errors import StoreCorrupt
from ackbone.core.store import Decode, Taken, Verdict

from .claiming import Claiming
from .claims import admit, adopt_in_order, claim_ready
from .tables import QueueRows

LANE_CHUNK = 200
"""Messages with an ordering key that are moved into their lanes at a time."""
LANE_CHUNKS = 5
"""How often that is done at most in one transaction."""


async def take(claim: Claiming, decode: Decode, limit: int) -> Taken:
    """Due work of the store and new messages of the queue, the highest priority first."""
    queue, sub = claim.tx.queue, claim.sub
    if queue is None:
        raise StoreCorrupt("taking from the queue needs a queue in the same file")
    now_us = await claim.tx.moment()
    queue_due = await queue.promote()
    verdicts: list[Verdict] = []
    more_keyed = False
    if sub.ordered:
        more_keyed = await _fill_lanes(claim, queue, decode, limit)
    else:  # half of the room: neither those with a key nor those without starve the others
        verdicts += await _take_keyed(claim, queue, decode, (limit + 1) // 2)
    first = await queue.first_due(sub.name)
    due = [priority for priority, at in first if at <= now_us]
    for priority in due:  # new messages above it go first, then those that waited here
        room = limit - len(verdicts)
        verdicts += await _take_new(claim, queue, decode, room, priority + 1)
        verdicts += await claim_ready(claim, limit - len(verdicts), priorities=(priority,))
    verdicts += await _take_new(claim, queue, decode, limit - len(verdicts), 0)
    if len(verdicts) < limit and not sub.ordered:
        verdicts += await _take_keyed(claim, queue, decode, limit - len(verdicts))
    next_due_s = None
    if len(verdicts) < limit:
        later = (
            await queue.next_due(sub.name) if due else min((at for _, at in first), default=None)
        )
        waits = [at for at in (later, queue_due) if at is not None]
        next_due_s = (min(waits) - now_us) / 1e6 if waits else None
        next_due_s = 0.0 if more_keyed else next_due_s
    return Taken(verdicts=verdicts, next_due_s=next_due_s)


async def _take_new(
    claim: Claiming, queue: QueueRows, decode: Decode, limit: int, floor: int
) -> list[Verdict]:
    """New messages without an ordering key, none below the priority `floor`."""
    if limit <= 0:
        return []
    taken = await queue.take(claim.sub, limit=limit, keyed=False, floor=floor)
    return await admit(claim, [decode(delivery) for delivery in taken])


async def _take_keyed(
    claim: Claiming, queue: QueueRows, decode: Decode, limit: int
) -> list[Verdict]:
    """New messages with an ordering key, which mean nothing where no order is asked for."""
    taken = await queue.take(claim.sub, limit=limit, keyed=True)
    return await admit(claim, [decode(delivery) for delivery in taken])


async def _fill_lanes(claim: Claiming, queue: QueueRows, decode: Decode, limit: int) -> bool:
    """Move messages with an ordering key into their lanes until enough conversations can go on.

    True: it stopped before that, because it must not hold the write lock for a whole backlog.
    """
    for _ in range(LANE_CHUNKS):
        if not await queue.has_keyed(claim.sub):
            return False
        if await queue.ready_heads(claim, limit) >= limit:
            return False
        taken = await queue.take(claim.sub, limit=LANE_CHUNK, keyed=True)
        await adopt_in_order(claim, [decode(delivery) for delivery in taken])
    return True
