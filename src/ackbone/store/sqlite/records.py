"""`SqliteRecords`: the store, and the queue beside it, as operators look at them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ackbone.core import records
from ackbone.core.approvals import Approval, ApprovalFilter
from ackbone.core.delivery_desk import DeliveryFilter, DeliveryRecord
from ackbone.core.quota import QuotaUse
from ackbone.core.records import LetterFilter
from ackbone.sqlite.file import SqliteFile
from ackbone.sqlite.liveness import is_alive
from ackbone.sqlite.wake import OUTGOING, WORK
from ackbone.store.quota_book import use_of_row

from . import approvals, counts, delivery_desk, quotas, views


class SqliteRecords:
    """`Records` on one SQLite file; `queue` is the broker's file if that is another one."""

    def __init__(
        self, file: SqliteFile, *, queue: SqliteFile | None = None, lease_s: float = 10.0
    ) -> None:
        self._file = file
        self._queue = queue or file
        self._lease_s = lease_s

    async def letters(
        self, where: LetterFilter, *, limit: int, before: str | None = None
    ) -> Sequence[records.DeadLetter]:
        return await self._file.read(lambda conn: views.letters(conn, where, limit, before))

    async def letter_ids(self, where: LetterFilter, *, limit: int | None) -> Sequence[str]:
        return await self._file.read(lambda conn: views.letter_ids(conn, where, limit))

    async def letters_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[records.DeadLetter]:
        return await self._file.read(lambda conn: views.letters_named(conn, name, tenant_id, limit))

    async def letters_by_id(self, ids: Sequence[str]) -> Sequence[records.DeadLetter]:
        return await self._file.read(lambda conn: views.letters_by_id(conn, ids))

    async def letters_of(self, tenant_id: str, message_id: str) -> Sequence[records.DeadLetter]:
        return await self._file.read(lambda conn: views.letters_of(conn, tenant_id, message_id))

    async def parked(
        self,
        *,
        queue: str | None = None,
        kind: str | None = None,
        tenant_id: str | None = None,
        limit: int,
        before: int | None = None,
    ) -> Sequence[tuple[int, records.Task]]:
        return await self._file.read(
            lambda conn: views.parked(conn, queue, kind, tenant_id, limit, before)
        )

    async def tasks(self, tenant_id: str | None, message_id: str) -> Sequence[records.Task]:
        return await self._file.read(lambda conn: views.tasks(conn, tenant_id, message_id))

    async def tasks_like(
        self, prefix: str, *, tenant_id: str | None, status: str | None, limit: int
    ) -> Sequence[records.Task]:
        return await self._file.read(
            lambda conn: views.tasks_like(conn, prefix, tenant_id, status, limit)
        )

    async def tasks_correlated(self, correlation_id: str, *, limit: int) -> Sequence[records.Task]:
        return await self._file.read(
            lambda conn: views.tasks_correlated(conn, correlation_id, limit)
        )

    async def find(
        self, name: str, *, tenant_id: str | None, limit: int
    ) -> Sequence[records.Found]:
        return await self._file.read(lambda conn: views.find(conn, name, tenant_id, limit))

    async def events_of(self, tenant_id: str, message_id: str) -> Sequence[records.LedgerEvent]:
        return await self._file.read(lambda conn: views.events_of(conn, tenant_id, message_id))

    async def effects_of(self, tenant_id: str, message_id: str) -> Sequence[records.Effect]:
        return await self._file.read(lambda conn: views.effects_of(conn, tenant_id, message_id))

    async def replies_of(self, tenant_id: str, message_id: str) -> Sequence[records.Reply]:
        return await self._file.read(lambda conn: views.replies_of(conn, tenant_id, message_id))

    async def waiting_with(self, text: str, *, limit: int) -> Sequence[records.Waiting]:
        return await self._queue.read(lambda conn: views.waiting_with(conn, text, limit))

    async def approvals(
        self, where: ApprovalFilter, *, limit: int, after: str | None = None
    ) -> Sequence[Approval]:
        return await self._file.read(lambda conn: approvals.listed(conn, where, limit, after))

    async def approvals_named(
        self, name: str, *, tenant_id: str | None, limit: int
    ) -> Sequence[Approval]:
        return await self._file.read(lambda conn: approvals.named(conn, name, tenant_id, limit))

    # -- replies ----------------------------------------------------------------------------------

    async def deliveries(self, where: DeliveryFilter, *, limit: int) -> Sequence[DeliveryRecord]:
        return await self._file.read(lambda conn: delivery_desk.listed(conn, where, limit))

    async def delivery_ids(self, where: DeliveryFilter, *, limit: int | None) -> Sequence[str]:
        return await self._file.read(lambda conn: delivery_desk.ids(conn, where, limit))

    async def deliveries_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeliveryRecord]:
        return await self._file.read(lambda conn: delivery_desk.named(conn, name, tenant_id, limit))

    async def paused_channels(self) -> frozenset[str]:
        return await self._file.read(delivery_desk.paused)

    # -- numbers ----------------------------------------------------------------------------------

    async def quota_use(self, *, tenant_id: str | None = None) -> Sequence[QuotaUse]:
        return await self._file.read(
            lambda conn: [use_of_row(row) for row in conn.execute(quotas.USE, (tenant_id,))]
        )

    async def queues(self) -> Sequence[records.QueueState]:
        sent = await self._queue.read(counts.queued)
        now = self._file.clock.now_us()
        return await self._file.read(lambda conn: counts.queues(conn, sent, now))

    async def counts(self) -> Sequence[records.Count]:
        return await self._file.read(counts.statuses)

    async def reply_counts(self) -> Sequence[records.Count]:
        return await self._file.read(counts.replies)

    async def event_counts(self, since_us: int) -> Sequence[records.Count]:
        return await self._file.read(lambda conn: counts.events_since(conn, since_us))

    async def workers(self) -> Sequence[records.WorkerState]:
        file = self._file

        def alive(worker_id: int) -> bool:
            return is_alive(file.workers_folder, worker_id, lease_s=self._lease_s, clock=file.clock)

        return await file.read(lambda conn: counts.workers(conn, alive))

    async def events_after(
        self, position: int, *, limit: int, since_us: int | None = None
    ) -> Sequence[records.LedgerEvent]:
        return await self._file.read(
            lambda conn: views.events_after(conn, position, limit, since_us)
        )

    async def last_position(self, *, back: int = 0) -> int:
        return await self._file.read(lambda conn: views.last_position(conn, back))

    def subscribe(self) -> asyncio.Event:
        return self._file.subscribe(WORK, OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._file.unsubscribe(event)
