"""Governance beside the runs: unanswered approvals expire, and new quotas are looked at."""

from __future__ import annotations

from ackbone.core.store import Worker

from .approvals import expire
from .unit import WORK, Change, Tx, UnitOfWork


class StoreGovernance:
    """`GovernanceUpkeep` of a store."""

    def __init__(self, store: UnitOfWork) -> None:
        self._store = store

    async def has_overdue(self) -> bool:
        if self._store.expiry_paused:
            return False
        return bool(await self._store.read_due(self._store.sql.maintenance.approvals_due))

    async def expire(self, *, worker: Worker) -> int:
        if self._store.expiry_paused:
            return 0
        return await self._store.write(expire, worker_id=worker.worker_id)

    async def quotas_changed(self) -> int:
        async def op(tx: Tx, change: Change) -> int:
            now_us = await tx.moment()
            found = await tx.rows(tx.sql.maintenance.look_at_quotas_again, now_us)
            tx.before_end(tx.sql.maintenance.forget_quota_waits)
            if found:
                change.topics.add(WORK)
            return len(found)

        return await self._store.write(op, worker_id=0)
