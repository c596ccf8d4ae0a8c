"""`PostgresClerk`: what relays do for governance."""

from __future__ import annotations

from ackbone.core.store import Worker
from ackbone.store.approvals import expire
from ackbone.store.unit import Change

from . import approvals
from .database import Tx
from .quotas import FORGET_WAITS, LOOK_AGAIN
from .store import PostgresStore
from .wake import WORK


class PostgresClerk:
    """`Clerk` of the store's database."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def has_overdue(self) -> bool:
        if self._store.expiry_paused:
            return False
        return bool(await self._store.read(approvals.OVERDUE))

    async def expire(self, *, worker: Worker) -> int:
        if self._store.expiry_paused:
            return 0
        return await self._store.write(expire, worker_id=worker.worker_id)

    async def quotas_changed(self) -> int:
        async def op(tx: Tx, change: Change) -> int:
            found = await tx.rows(LOOK_AGAIN)
            tx.before_end(FORGET_WAITS)
            change.topics.add(WORK)
            return len(found)

        return await self._store.write(op, worker_id=0)
