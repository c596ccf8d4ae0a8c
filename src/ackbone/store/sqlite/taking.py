"""Take: receive and claim in one transaction, if the broker's queue is in the store's file.

Taking a message deletes it from the queue and writes it, body and all, into its task row. There is
no second copy afterwards, so nothing has to be settled, redelivered or reclaimed.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from ackbone.core.broker import Transactional
from ackbone.core.store import Decode, Taken, Verdict
from ackbone.store.claiming import Claiming
from ackbone.store.claims import PRIORITIES, admit, adopt_in_order, claim_ready

from .sql import SQL
from .task_rows import chosen, chosen_value

LANE_CHUNK = 200
"""Messages with an ordering key that are moved into their lanes at a time."""
LANE_CHUNKS = 5
"""How often that is done at most in one transaction."""
FIRST_DUE = " UNION ALL ".join(
    f"SELECT {p}, min(due_at) FROM queue_executions WHERE subscription = ?1"
    f" AND status = 'ready' AND priority = {p}"
    for p in PRIORITIES
)
READY_HEADS = {
    rule: "SELECT count(*) FROM (SELECT 1 FROM queue_executions WHERE subscription = ?1"
    " AND status = 'ready' AND priority IN (0, 1, 2, 3) AND due_at <= ?2 AND crashes = 0"
    f" AND lane IS NOT NULL{condition} LIMIT ?3)"
    for rule, condition in chosen(4).items()
}


class Queue(NamedTuple):
    """The broker's queue inside a transaction of the writer thread."""

    conn: sqlite3.Connection
    now_us: int
    broker: Transactional
    claim: Claiming
    decode: Decode

    async def take(self, limit: int) -> Taken:
        """Due work of the store and new messages of the queue, the highest priority first."""
        conn, now_us, claim, sub = self.conn, self.now_us, self.claim, self.claim.sub
        queue_due = self.broker.promote_in(conn, now_us)
        verdicts: list[Verdict] = []
        more_keyed = False
        if sub.ordered:
            more_keyed = await self._fill_lanes(limit)
        else:  # half of the room: neither those with a key nor those without starve the others
            verdicts += await self._take_keyed((limit + 1) // 2)
        found = conn.execute(FIRST_DUE, (sub.name,))
        first = [(priority, at) for priority, at in found if at is not None]
        due = [priority for priority, at in first if at <= now_us]
        for priority in due:  # new messages above it go first, then those that waited here
            verdicts += await self._take_new(limit - len(verdicts), priority + 1)
            verdicts += await claim_ready(claim, limit - len(verdicts), priorities=(priority,))
        verdicts += await self._take_new(limit - len(verdicts), 0)
        if len(verdicts) < limit and not sub.ordered:
            verdicts += await self._take_keyed(limit - len(verdicts))
        next_due_s = None
        if len(verdicts) < limit:
            later = min((at - now_us for _, at in first), default=None)
            if due:
                (later,) = conn.execute(SQL.store.next_due, (sub.name, now_us)).fetchone()
            until = None if queue_due is None else queue_due - now_us
            waits = [wait_us for wait_us in (later, until) if wait_us is not None]
            next_due_s = min(waits) / 1e6 if waits else None
            next_due_s = 0.0 if more_keyed else next_due_s
        return Taken(verdicts=verdicts, next_due_s=next_due_s)

    async def _take_new(self, limit: int, floor: int) -> list[Verdict]:
        """New messages without an ordering key, none below the priority `floor`."""
        if limit <= 0:
            return []
        taken = self.broker.take_in(
            self.conn, self.claim.sub, limit=limit, keyed=False, floor=floor
        )
        return await admit(self.claim, [self.decode(delivery) for delivery in taken])

    async def _take_keyed(self, limit: int) -> list[Verdict]:
        """New messages with an ordering key, which mean nothing where no order is asked for."""
        taken = self.broker.take_in(self.conn, self.claim.sub, limit=limit, keyed=True, floor=0)
        return await admit(self.claim, [self.decode(delivery) for delivery in taken])

    async def _fill_lanes(self, limit: int) -> bool:
        """Move messages with an ordering key into their lanes until enough conversations can go on.

        True: it stopped before that, because it must not hold the write lock for a whole backlog.
        """
        conn, sub = self.conn, self.claim.sub
        for _ in range(LANE_CHUNKS):
            if not self.broker.has_keyed_in(conn, sub):
                return False
            if await self._ready_heads(limit) >= limit:
                return False
            taken = self.broker.take_in(conn, sub, limit=LANE_CHUNK, keyed=True, floor=0)
            await adopt_in_order(self.claim, [self.decode(delivery) for delivery in taken])
        return True

    async def _ready_heads(self, limit: int) -> int:
        """Conversations with a message that this worker could run now, counted up to `limit`.

        A message that waits for a retry, that crashed a worker, or that only another worker can
        handle does not count: it must not keep others out of their lanes.
        """
        choice = await self.claim.choice()
        values = (self.claim.sub.name, self.now_us, limit, *chosen_value(choice))
        (found,) = self.conn.execute(READY_HEADS[choice.rule], values).fetchone()
        return int(found)
