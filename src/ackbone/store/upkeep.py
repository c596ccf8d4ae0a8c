"""Services of a store beside its runs: copies that a broker lost, approvals that nobody answered,
quotas that changed, metrics, and how messages of a trigger ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ackbone.core.ids import new_id
from ackbone.core.meter import MetricRow
from ackbone.core.outcome import Ending, Identity, Status
from ackbone.core.store import Worker

from .base import BaseStore
from .conditions import STATUS_OF_EVENT
from .outcomes import TaskRow, bury
from .parked import expire
from .tasks import decode_history
from .unit import WORK, Change, Tx


class StoreGovernance:
    """`GovernanceUpkeep` of a store."""

    def __init__(self, store: BaseStore[Any]) -> None:
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


class StoreMetricRows:
    """`MetricRows` of a store."""

    def __init__(self, store: BaseStore[Any]) -> None:
        self._store = store

    async def add(self, batch: Sequence[MetricRow]) -> None:
        async def op(tx: Tx, change: Change) -> None:
            now_us = await tx.moment()
            for row in batch:
                tags = msgspec.json.encode(row.tags).decode()
                values = (new_id(), row.tenant_id, row.queue, row.name, row.value, now_us, tags)
                tx.at_end(tx.sql.maintenance.add_metric, *values)

        await self._store.write(op, worker_id=0, durable=False)


REASON = "copy_lost"
ERROR = (
    "the broker has no copy of this message any more, and the store never had its body. Send it"
    " again under a new id. If a copy with this id still arrives, it completes this dead letter,"
    " which can then be replayed"
)


class Lost(TaskRow):
    """A task that ended because its copy is gone; the fields are in the order of the columns."""

    attempt: int
    crashes: int
    key: str | None
    history: str | None


class StoreCopies:
    """`Copies` of a store."""

    def __init__(self, store: BaseStore[Any]) -> None:
        self._store = store

    async def waiting(self, subscription: str, *, for_s: float, limit: int) -> Sequence[Identity]:
        statement = self._store.sql.maintenance.copies_due
        found = await self._store.read_due(statement, subscription, int(for_s * 1e6), limit)
        return [(tenant_id, message_id) for tenant_id, message_id in found]

    async def end(
        self, subscription: str, lost: Sequence[Identity], *, for_s: float, worker: Worker
    ) -> int:
        async def op(tx: Tx, change: Change) -> int:
            now_us = await tx.moment()
            before_us = now_us - int(for_s * 1e6)
            ended = 0
            # Sorted: two workers that end the same tasks lock their rows in one order.
            for tenant_id, message_id in sorted(lost):
                task = (tenant_id, subscription, message_id)
                values = (*task, now_us, ERROR, before_us)
                for row in await tx.rows(tx.sql.maintenance.end_copy, *values):
                    _end(tx, change, Lost(*row), now_us)
                    ended += 1
            if ended:
                change.topics.add(WORK)
            return ended

        return await self._store.write(op, worker_id=worker.worker_id)


def _end(tx: Tx, change: Change, task: Lost, now_us: int) -> None:
    retry_count, history = max(0, task.attempt - task.crashes), decode_history(task.history)
    letter = task.letter(REASON, ERROR, retry_count=retry_count, history=history)
    final = task.final(Status.FAILED, reason=REASON, error=ERROR)
    change.entries += [final, bury(tx, letter, now_us)]
    task.let_go(tx, change, task.key, None)


_decode = msgspec.json.Decoder().decode


class StoreEndings:
    """`Endings` of an open store."""

    def __init__(self, store: BaseStore[Any]) -> None:
        self._store = store
        self._sql = store.sql.records

    async def __call__(
        self, subscription: str, identities: Sequence[Identity]
    ) -> Mapping[Identity, Ending]:
        if not identities:
            return {}
        found = await self._store.read(
            self._sql.final_events,
            subscription,
            [tenant_id for tenant_id, _ in identities],
            [task_id for _, task_id in identities],
        )
        return {(tenant_id, task_id): _ending(*event) for tenant_id, task_id, *event in found}


def _ending(event_type: str, data: str, history: str | None) -> Ending:
    """`history` lists the failed attempts of the dead letter, if there is one. Tracebacks are left
    out: they stay in the store."""
    attempts = _decode(history) if history else ()
    return Ending(
        status=STATUS_OF_EVENT[event_type],
        data=_decode(data),
        history=[{k: v for k, v in each.items() if k != "traceback"} for each in attempts],
    )
