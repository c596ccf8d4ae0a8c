"""The deliveries table: replies that were committed with their runs, and where they are now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.core import events
from holdfast.core.delivery import Outbound
from holdfast.core.store import Worker

from . import arrays
from .change import Change
from .database import Tx
from .store import PostgresStore
from .tasks import NOW
from .wake import OUTGOING

_PENDING = f"channel = $1 AND status = 'pending' AND due_at <= {NOW}"
_TAKE = (
    "UPDATE deliveries d SET status = 'sending', worker_id = $2::bigint,"
    " last_attempt_at = clock_timestamp() FROM (SELECT id FROM deliveries"
    f" WHERE {_PENDING} ORDER BY created_at, id LIMIT $3::int FOR UPDATE SKIP LOCKED) f"
    " WHERE d.id = f.id RETURNING d.created_at, d.id, d.tenant_id, d.channel, d.recipient,"
    " d.content, d.conversation, d.task_id"
)
_MINE = " WHERE id = ANY($1::text[]) AND status = 'sending' AND worker_id = $2::bigint"


class PostgresDeliveries:
    """`Deliveries` of the store's database. Each step is a compare-and-set on the row's status."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def waiting(self, channel: str) -> bool:
        found = await self._store.read(
            f"SELECT 1 FROM deliveries WHERE {_PENDING} LIMIT 1", channel
        )
        return bool(found)

    async def take(self, channel: str, *, limit: int, worker: Worker) -> Sequence[Outbound]:
        async def op(tx: Tx, change: Change) -> list[Outbound]:
            found = await tx.rows(_TAKE, channel, str(worker.worker_id), str(limit))
            names = Outbound.__struct_fields__
            return [Outbound(**dict(zip(names, row[1:], strict=True))) for row in sorted(found)]

        # Not synced: if a crash of the server takes it back, nothing was marked and all is pending.
        return await self._store.write(op, worker_id=worker.worker_id, durable=False)

    async def sent(self, ids: Sequence[str], *, worker: Worker) -> None:
        async def op(tx: Tx, change: Change) -> None:
            found = await tx.rows(
                f"UPDATE deliveries SET status = 'sent', last_error = NULL{_MINE}"
                " RETURNING tenant_id, subscription, task_id, id, channel",
                arrays.texts(list(ids)),
                str(worker.worker_id),
            )
            change.entries += [
                (
                    tenant,
                    sub or "",
                    task or "",
                    events.DELIVERY_SENT,
                    {"delivery_id": delivery_id, "channel": channel},
                )
                for tenant, sub, task, delivery_id, channel in found
            ]

        await self._store.write(op, worker_id=worker.worker_id)

    async def give_back(self, ids: Sequence[str], *, worker: Worker, error: str) -> None:
        async def op(tx: Tx, change: Change) -> None:
            tx.before_end(
                f"UPDATE deliveries SET last_error = $3, status = 'pending'{_MINE}",
                arrays.texts(list(ids)),
                str(worker.worker_id),
                error[:1000],
            )

        await self._store.write(op, worker_id=worker.worker_id)

    async def recover(self, channel: str, *, worker: Worker) -> int:
        async def op(tx: Tx, change: Change) -> int:
            found = await tx.rows(
                "UPDATE deliveries SET status = 'pending' WHERE channel = $1"
                " AND status = 'sending' AND (worker_id IS NULL OR worker_id NOT IN (SELECT"
                " worker_id FROM workers WHERE state = 'alive' AND worker_id <> $2::bigint))"
                " RETURNING 1",
                channel,
                str(worker.worker_id),
            )
            return len(found)

        return await self._store.write(op, worker_id=worker.worker_id)

    def subscribe(self) -> asyncio.Event:
        return self._store.subscribe_to(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)
