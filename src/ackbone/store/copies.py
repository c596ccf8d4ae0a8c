"""Messages that wait for the broker to bring their copy back, and the end of those whose copy the
broker lost: a dead letter without a body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ackbone.core import events
from ackbone.core.events import Entry
from ackbone.core.outcome import Identity, Status
from ackbone.core.store import Worker

from .outcomes import Letter, bury, final_data
from .tasks import decode_history
from .unit import WORK, Change, Tx, UnitOfWork

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

    def __init__(self, store: UnitOfWork) -> None:
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
