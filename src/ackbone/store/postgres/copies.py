"""`PostgresCopies`: messages that wait for the broker to bring their copy back."""

from __future__ import annotations

from collections.abc import Sequence

from ackbone.core.endings import Identity
from ackbone.core.store import Worker
from ackbone.store.copies import ERROR, Lost
from ackbone.store.letters import bury
from ackbone.store.stored import UNCOMMON
from ackbone.store.unit import Change

from .database import Tx
from .keys import free_keys
from .store import PostgresStore
from .tasks import NOW, PK

_BEFORE = f"due_at <= {NOW} - {{}}::float8 * interval '1 second'"
WAITING = (
    "SELECT tenant_id, message_id FROM queue_executions WHERE status = 'open'"
    f" AND {UNCOMMON} AND subscription = $1 AND {_BEFORE.format('$2')}"
    " ORDER BY due_at LIMIT $3::int"
)
END = (
    "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1,"
    f" completed_at = clock_timestamp(), error_message = $4 WHERE {PK} AND status = 'open'"
    f" AND {_BEFORE.format('$5')} RETURNING tenant_id, subscription, message_id, queue_name,"
    " event_name, attempt, crashes, idem_key, history::text, trace_id"
)


class PostgresCopies:
    """`Copies` of the store's database."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def waiting(self, subscription: str, *, for_s: float, limit: int) -> Sequence[Identity]:
        found = await self._store.read(WAITING, subscription, str(for_s), str(limit))
        return [(tenant_id, message_id) for tenant_id, message_id in found]

    async def end(
        self, subscription: str, lost: Sequence[Identity], *, for_s: float, worker: Worker
    ) -> int:
        async def op(tx: Tx, change: Change) -> int:
            now_us = await tx.moment()
            ended = 0
            for tenant_id, message_id in sorted(lost):
                row = (tenant_id, subscription, message_id)
                for found in await tx.rows(END, *row, ERROR, str(for_s)):
                    _let_go(tx, change, Lost(*found), now_us)
                    ended += 1
            return ended

        return await self._store.write(op, worker_id=worker.worker_id)


def _let_go(tx: Tx, change: Change, task: Lost, now_us: int) -> None:
    change.entries += [task.failed(), bury(tx, task.letter(), now_us)]
    if task.key is not None:
        free_keys(tx, [((task.tenant_id, task.subscription, task.key), task.message_id)])
    change.let_go(task.tenant_id, task.subscription, task.key, None)
