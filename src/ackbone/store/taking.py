"""Take: receive and claim in one transaction, if the broker's queue is in the store's database.

Taking a message deletes it from the queue and writes it, body and all, into its task row. There is
no second copy afterwards, so nothing has to be settled, redelivered or reclaimed.

Conversations: messages with an ordering key are moved into their lanes in the order of the queue,
by one transaction at a time. A message that is sent after the send of another one has returned
comes after it. Two sends that overlap have no order: on PostgreSQL the later number may be
committed, and moved, first.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from ackbone.core.broker import TAKE_BYTES, Delivery, Transactional
from ackbone.core.errors import StoreError, StoreUnavailable
from ackbone.core.store import Answer, Candidate, Decode, Taken, Verdict

from . import dead_on_arrival
from .claiming import Claiming
from .claims import admit, adopt_in_order, claim_due, granted_before, keep_granted
from .unit import WORK

log = logging.getLogger("ackbone.store")

LANE_CHUNK = 200
"""Messages with an ordering key that are moved into their lanes at a time."""
LANE_CHUNKS = 5
"""How often that is done at most in one transaction."""


class Refused(NamedTuple):
    """A message that the database refuses, and why."""

    candidate: Candidate
    error: Exception


class Taking:
    """One `take`. It may be undone and run again."""

    def __init__(
        self,
        queue: Transactional,
        decode: Decode,
        *,
        chunk: int = LANE_CHUNK,
        refused: Refused | None = None,
    ) -> None:
        """`chunk`: how many messages are moved into their lanes at a time. `refused`: the message
        that ends as a dead letter, because no row can hold it."""
        self._queue = queue
        self._decode = decode
        self._chunk = chunk
        self._refused = refused
        self.last: Candidate | None = None
        """The message that was decoded last."""
        self._is_large = False
        """The queue may have stopped for the size of the bodies: there may be more."""

    async def take(self, claim: Claiming, limit: int) -> Taken:
        """Due work of the store and new messages of the queue, the highest priority first."""
        tx, sub, queue = claim.tx, claim.sub, self._queue
        self.last, self._is_large = None, False
        verdicts = await granted_before(claim)
        await queue.promote_in(tx)
        more_keyed = False
        if sub.ordered:
            more_keyed = await self._fill_lanes(claim, limit)
        else:  # half of the room: neither those with a key nor those without starve the others
            verdicts += await self._take(claim, (limit - len(verdicts) + 1) // 2, keyed=True)
        found = await tx.rows(tx.sql.claims.first_due, sub.name, tx.now_us)
        first = [(priority, wait_us) for priority, wait_us in found if wait_us is not None]
        due = [priority for priority, wait_us in first if wait_us <= 0]
        for priority in due:  # new messages above it go first, then those that waited here
            verdicts += await self._take(claim, limit - len(verdicts), floor=priority + 1)
            if len(verdicts) < limit:
                verdicts += await claim_due(claim, limit - len(verdicts), priorities=(priority,))
        verdicts += await self._take(claim, limit - len(verdicts))
        if not sub.ordered:
            verdicts += await self._take(claim, limit - len(verdicts), keyed=True)
        keep_granted(claim, verdicts)
        next_due_s = None
        if len(verdicts) < limit:
            later = min((wait_us for _, wait_us in first), default=None)
            if due:
                ((later,),) = await tx.rows(tx.sql.store.next_due, sub.name, tx.now_us)
            until = await queue.next_due_in(tx)
            waits = [wait_us for wait_us in (later, until) if wait_us is not None]
            next_due_s = min(waits) / 1e6 if waits else None
            next_due_s = 0.0 if more_keyed or self._is_large else next_due_s
        return Taken(verdicts=verdicts, next_due_s=next_due_s)

    async def _take(
        self, claim: Claiming, limit: int, *, keyed: bool = False, floor: int = 0
    ) -> list[Verdict]:
        """New messages, those without an ordering key and none below the priority `floor`, or those
        with one, which mean nothing where no order is asked for."""
        if limit <= 0:
            return []
        taken = await self._queue.take_in(
            claim.tx, claim.sub, limit=limit, keyed=keyed, floor=floor
        )
        candidates = await self._candidates(claim, taken)
        ended = [Verdict(answer=Answer.DEAD)] * (len(taken) - len(candidates))
        return [*await admit(claim, candidates), *ended]

    async def _fill_lanes(self, claim: Claiming, limit: int) -> bool:
        """Move messages with an ordering key into their lanes until enough conversations can go on.

        True: it stopped before that, because it must not hold its locks for a whole backlog.
        """
        tx, sub = claim.tx, claim.sub
        if not await self._queue.has_keyed_in(tx, sub) or not await tx.lanes.lead(sub.name):
            return False  # who leads wakes the others
        chunk, moved = self._chunk, 0
        for _ in range(LANE_CHUNKS):
            if await tx.tasks.ready_heads(claim, await claim.choice(), limit) >= limit:
                return False
            taken = await self._queue.take_in(tx, sub, limit=chunk, keyed=True, floor=0)
            await adopt_in_order(claim, await self._candidates(claim, taken))
            moved += len(taken)
            if moved and not tx.exclusive:
                claim.change.topics.add(WORK)
            if len(taken) < chunk:
                return False
        return True

    async def _candidates(self, claim: Claiming, taken: Sequence[Delivery]) -> list[Candidate]:
        """Decode what was taken. The message that no row can hold ends here."""
        found = []
        self._is_large |= sum([len(delivery.body) for delivery in taken]) >= TAKE_BYTES
        for delivery in taken:
            self.last = candidate = self._decode(delivery)
            if self._refused is not None and _is_same(candidate, self._refused.candidate):
                await dead_on_arrival.unstorable(claim, candidate, self._refused.error)
            else:
                found.append(candidate)
        return found


def _is_same(one: Candidate, other: Candidate) -> bool:
    return bool(one.delivery.tag == other.delivery.tag)


async def take_in_halves(
    queue: Transactional,
    decode: Decode,
    commit: Callable[[Taking, int], Awaitable[Taken]],
    *,
    limit: int,
) -> Taken:
    """`commit` a take of `limit` messages; if it is refused, take half as many until one is left.

    That one ends as a dead letter. Raises StoreError if the store itself is the reason.
    """
    chunk, refused = LANE_CHUNK, None
    while True:
        taking = Taking(queue, decode, chunk=chunk, refused=refused)
        try:
            taken = await commit(taking, limit)
        except StoreError:
            raise
        except MemoryError as error:
            raise StoreUnavailable("there is no memory left to take messages") from error
        except Exception as error:
            if chunk == 1:
                if refused is not None or taking.last is None:
                    raise
                log.error("message %s cannot be stored: %s", taking.last.delivery.identity, error)
                refused = Refused(taking.last, error)
            limit = chunk = (limit + 1) // 2
            continue
        if chunk < LANE_CHUNK:  # fewer than asked for: there may be more
            return msgspec.structs.replace(taken, next_due_s=0.0)
        return taken
