"""What looks after a store beside its runs: copies that a broker lost, approvals that nobody
answered, quotas that changed, metrics, and how messages of a trigger ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ackbone.core import events
from ackbone.core.events import Entry
from ackbone.core.ids import new_id
from ackbone.core.meter import MetricRow
from ackbone.core.outcome import Ending, Identity, Status
from ackbone.core.store import Worker

from .approvals import expire
from .base import BaseStore
from .conditions import STATUS_OF_EVENT
from .outcomes import Letter, bury, final_data
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


class Lost(NamedTuple):
    """A task that ended because its copy is gone; the fields are in the order of the columns."""

    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    event_name: str | None
    attempt: int
    crashes: int
    key: str | None
    history: str | None
    trace_id: str | None

    def failed(self) -> Entry:
        """The final event."""
        data = final_data(
            self.queue,
            self.tenant_id,
            self.message_id,
            self.event_name,
            self.trace_id,
            Status.FAILED,
        )
        data.update(reason=REASON, error=ERROR)
        return self.tenant_id, self.subscription, self.message_id, events.FAILED, data

    def letter(self) -> Letter:
        return Letter(
            tenant_id=self.tenant_id,
            subscription=self.subscription,
            message_id=self.message_id,
            queue=self.queue,
            event_name=self.event_name,
            reason=REASON,
            error=ERROR,
            retry_count=max(0, self.attempt - self.crashes),
            history=decode_history(self.history),
        )


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
    change.entries += [task.failed(), bury(tx, task.letter(), now_us)]
    if task.key is not None:
        key = (task.tenant_id, task.subscription, task.key)
        tx.before_end(tx.sql.operations.free_key, *key, task.message_id)
    change.let_go(task.tenant_id, task.subscription, task.key, None)


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
