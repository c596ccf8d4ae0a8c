"""The outbox table. Its relay is one worker of the fleet at a time, by its role."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ackbone.core.store import Worker
from ackbone.store.letters import Letter, bury
from ackbone.store.outbox import REFUSED_WAIT_S, Row
from ackbone.store.unit import Change

from . import arrays
from .database import Tx
from .store import PostgresStore
from .tasks import BEGUN, NOW
from .wake import OUTGOING

DUE = (
    "SELECT id, tenant_id, queue_name, message_id, headers::text, body, body_crc, priority,"
    f" ordering_key, ttl_us, clock_timestamp() FROM outbox WHERE due_at <= {NOW}"
    " ORDER BY due_at, id LIMIT $1::int"
)
_DELETE = "DELETE FROM outbox WHERE id = ANY($1::uuid[])"
_WAIT = (
    f"UPDATE outbox SET due_at = {BEGUN} + $2::float8 * interval '1 second'"
    " WHERE id = ANY($1::uuid[])"
)


class PostgresOutboxRows:
    """`OutboxRows` of the store's database."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def due(self, limit: int) -> Sequence[Row]:
        found = await self._store.read_due(DUE, str(limit))
        return [Row(row_id.bytes, *rest) for row_id, *rest in found]

    async def settle(
        self,
        *,
        gone: Sequence[Row],
        waiting: Sequence[Row],
        letters: Sequence[Letter],
        worker: Worker,
    ) -> None:
        async def op(tx: Tx, change: Change) -> None:
            tx.before_end(_DELETE, arrays.ids(sorted(row.id for row in gone)))
            if waiting:
                ids = arrays.ids(sorted(row.id for row in waiting))
                tx.before_end(_WAIT, ids, str(REFUSED_WAIT_S))
            if letters:
                now_us = await tx.moment()
                change.entries += [bury(tx, letter, now_us) for letter in letters]

        # Not synced: what a crash of the server brings back is published again, and recognized.
        await self._store.write(op, worker_id=worker.worker_id, durable=bool(letters))

    def subscribe(self) -> asyncio.Event:
        return self._store.subscribe_to(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)
