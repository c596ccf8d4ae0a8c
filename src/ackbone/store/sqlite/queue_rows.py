"""The queue in the store's own file, inside a transaction of the writer thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ackbone.core.broker import Delivery, Subscription, Transactional
from ackbone.store.claims import PRIORITIES

from .task_rows import chosen, chosen_value

if TYPE_CHECKING:
    from ackbone.store.claiming import Claiming

FIRST_DUE = " UNION ALL ".join(
    f"SELECT {p}, min(due_at) FROM queue_executions WHERE subscription = ?1"
    f" AND status = 'ready' AND priority = {p}"
    for p in PRIORITIES
)
NEXT_DUE = " UNION ALL ".join(
    f"SELECT min(due_at) FROM queue_executions WHERE subscription = ?1"
    f" AND status = 'ready' AND priority = {p} AND due_at > ?2"
    for p in PRIORITIES
)
READY_HEADS = {
    rule: "SELECT count(*) FROM (SELECT 1 FROM queue_executions WHERE subscription = ?1"
    " AND status = 'ready' AND priority IN (0, 1, 2, 3) AND due_at <= ?2 AND crashes = 0"
    f" AND lane IS NOT NULL{condition} LIMIT ?3)"
    for rule, condition in chosen(4).items()
}


class SqliteQueueRows:
    """`QueueRows` of a broker on the same file."""

    def __init__(self, conn: sqlite3.Connection, now_us: int, queue: Transactional) -> None:
        self._conn = conn
        self._now_us = now_us
        self._queue = queue

    async def promote(self) -> int | None:
        return self._queue.promote_in(self._conn, self._now_us)

    async def has_keyed(self, sub: Subscription) -> bool:
        return self._queue.has_keyed_in(self._conn, sub)

    async def take(
        self, sub: Subscription, *, limit: int, keyed: bool, floor: int = 0
    ) -> Sequence[Delivery]:
        return self._queue.take_in(self._conn, sub, limit=limit, keyed=keyed, floor=floor)

    async def ready_heads(self, claim: Claiming, limit: int) -> int:
        choice = await claim.choice()
        values = (claim.sub.name, self._now_us, limit, *chosen_value(choice))
        (found,) = self._conn.execute(READY_HEADS[choice.rule], values).fetchone()
        return int(found)

    async def first_due(self, subscription: str) -> list[tuple[int, int]]:
        found = self._conn.execute(FIRST_DUE, (subscription,))
        return [(priority, at) for priority, at in found if at is not None]

    async def next_due(self, subscription: str) -> int | None:
        return next_due(self._conn, subscription, self._now_us)


def next_due(conn: sqlite3.Connection, subscription: str, now_us: int) -> int | None:
    """When the next task that waits in the store is due (µs)."""
    found = conn.execute(NEXT_DUE, (subscription, now_us))
    return min((due for (due,) in found if due is not None), default=None)
