"""Records of a store as operators read them; nothing here writes or takes a write lock.

Searches without a tenant first ask which tenants there are, because every index begins with the
tenant.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from ackbone.core.approvals import Approval, ApprovalFilter
from ackbone.core.outbound.delivery_records import DeliveryFilter, DeliveryRecord
from ackbone.core.quota import QuotaUse
from ackbone.core.records import (
    Count,
    DeadLetter,
    Effect,
    Found,
    LedgerEvent,
    LetterFilter,
    QueueState,
    Reply,
    Task,
    Waiting,
    WorkerState,
)

from .delivery_rows import ALL, PAUSED
from .parked import of_row
from .record_rows import (
    delivery_of_row,
    effect_of_row,
    event_of_row,
    letter_of_row,
    quota_use_of_row,
    reply_of_row,
    task_of_row,
    text_id,
    uuid_text,
    worker_of_row,
)
from .sql import Statements
from .unit import Row

HIGHEST = chr(0x10FFFF)
"""The last character: every text that begins with `x` is between `x` and `x + HIGHEST`."""


class StoreRecords(ABC):
    """`Records`, `ApprovalRecords` and `QuotaRecords` of a store, read through one dialect."""

    def __init__(self, read: Callable[..., Awaitable[list[Row]]], sql: Statements) -> None:
        self._read = read
        self._sql = sql

    # -- dead letters -----------------------------------------------------------------------------

    async def letters(
        self, where: LetterFilter, *, limit: int, before: str | None = None
    ) -> Sequence[DeadLetter]:
        last = None if before is None else uuid_text(before)
        if before is not None and last is None:
            return []
        found = await self._read(self._sql.records.letters, limit, last, *_values(where))
        return [letter_of_row(row) for row in found]

    async def letter_ids(self, where: LetterFilter, *, limit: int | None) -> Sequence[str]:
        found = await self._read(self._sql.records.letter_ids, limit, None, *_values(where))
        return [text_id(row_id) for (row_id,) in found]

    async def letters_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeadLetter]:
        sql = self._sql.records
        found = await self._named(sql.letters_named, sql.letters_named_like, name, tenant_id, limit)
        return [letter_of_row(row) for row in found]

    async def letters_by_id(self, ids: Sequence[str]) -> Sequence[DeadLetter]:
        wanted = dict.fromkeys(each for each in map(uuid_text, ids) if each is not None)
        found = await self._read(self._sql.records.letters_by_id, list(wanted))
        letters = {letter.id: letter for letter in map(letter_of_row, found)}
        return [letters[each] for each in wanted if each in letters]

    async def letters_of(self, tenant_id: str, message_id: str) -> Sequence[DeadLetter]:
        found = await self._read(self._sql.records.letters_of, tenant_id, message_id)
        return [letter_of_row(row) for row in found]

    async def _named(
        self, exact: str, like: str, name: str, tenant_id: str | None, limit: int
    ) -> list[Row]:
        """Rows with this row id or message id; if there are none, those whose id begins with it."""
        found = await self._read(exact, uuid_text(name), tenant_id, limit, name)
        if found:
            return found
        digits = name.replace("-", "").lower()
        return await self._read(like, name, tenant_id, limit, name + HIGHEST, digits, digits + "g")

    # -- tasks ------------------------------------------------------------------------------------

    async def parked(
        self,
        *,
        queue: str | None = None,
        kind: str | None = None,
        tenant_id: str | None = None,
        limit: int,
        before: int | None = None,
    ) -> Sequence[tuple[int, Task]]:
        place = None if before is None else self._place(before)
        found = await self._read(self._sql.records.parked, queue, kind, tenant_id, place, limit)
        return [(self._place_number(row[0]), task_of_row(row)) for row in found]

    async def tasks(self, tenant_id: str | None, message_id: str) -> Sequence[Task]:
        sql = self._sql.records
        found: list[Task] = []
        for tenant in await self._tenants(sql.tenants_of_tasks, tenant_id):
            found += map(task_of_row, await self._read(sql.tasks, tenant, message_id))
        return found

    async def tasks_like(
        self, prefix: str, *, tenant_id: str | None, status: str | None, limit: int
    ) -> Sequence[Task]:
        sql = self._sql.records
        found: list[Task] = []
        for tenant in await self._tenants(sql.tenants_of_tasks, tenant_id):
            rows = await self._read(
                sql.tasks_like, tenant, prefix, prefix + HIGHEST, status, limit - len(found)
            )
            found += map(task_of_row, rows)
        return found

    async def tasks_correlated(self, correlation_id: str, *, limit: int) -> Sequence[Task]:
        found = await self._read(self._sql.records.tasks_correlated, correlation_id, limit)
        return [task_of_row(row) for row in found]

    async def find(self, name: str, *, tenant_id: str | None, limit: int) -> Sequence[Found]:
        sql = self._sql.records
        tasks = await self._tenants(sql.tenants_of_tasks, tenant_id)
        events = await self._tenants(sql.tenants_of_events, tenant_id)
        for by, in_tasks, in_events, asked in (
            ("id", sql.find_task, sql.find_event, (name,)),
            ("prefix", sql.find_tasks_like, sql.find_events_like, (name, name + HIGHEST)),
        ):
            found: set[tuple[str, str]] = set()
            for tenants, statement in ((tasks, in_tasks), (events, in_events)):
                for tenant in tenants:
                    rows = await self._read(statement, tenant, limit, *asked)
                    found.update((message_id, tenant) for (message_id,) in rows)
            if found:
                return [
                    Found(tenant_id=tenant, message_id=message_id, by=by)
                    for message_id, tenant in sorted(found)[:limit]
                ]
        rows = await self._read(sql.find_related, name, tenant_id, limit)
        return [Found(tenant_id=tenant, message_id=id_, by=by) for tenant, id_, by in rows]

    async def _tenants(self, statement: str, given: str | None) -> list[str]:
        if given is not None:
            return [given]
        return [name for (name,) in await self._read(statement)]

    # -- replies ----------------------------------------------------------------------------------

    async def deliveries(self, where: DeliveryFilter, *, limit: int) -> Sequence[DeliveryRecord]:
        """The newest first."""
        asked = (where.status, where.channel, where.tenant_id, where.since_us)
        found = await self._read(self._sql.deliveries.records, *asked, limit)
        return [delivery_of_row(row) for row in found]

    async def delivery_ids(self, where: DeliveryFilter, *, limit: int | None) -> Sequence[str]:
        """The oldest first."""
        asked = (where.status, where.channel, where.tenant_id, where.since_us)
        most = ALL if limit is None else limit
        return [id_ for (id_,) in await self._read(self._sql.deliveries.ids, *asked, most)]

    async def deliveries_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeliveryRecord]:
        """The delivery with this id, or those whose ids begin with it."""
        sql = self._sql.deliveries
        found = await self._read(sql.named, name, tenant_id, limit)
        found = found or await self._read(sql.beginning, name, tenant_id, limit)
        return [delivery_of_row(row) for row in found]

    async def paused_channels(self) -> frozenset[str]:
        found = await self._read(self._sql.deliveries.paused, PAUSED)
        return frozenset(role.removeprefix(PAUSED) for (role,) in found)

    # -- what belongs to a message ----------------------------------------------------------------

    async def events_of(self, tenant_id: str, message_id: str) -> Sequence[LedgerEvent]:
        return self._events(await self._read(self._sql.records.events_of, tenant_id, message_id))

    async def effects_of(self, tenant_id: str, message_id: str) -> Sequence[Effect]:
        found = await self._read(self._sql.records.effects_of, tenant_id, message_id)
        return [effect_of_row(row) for row in found]

    async def replies_of(self, tenant_id: str, message_id: str) -> Sequence[Reply]:
        found = await self._read(self._sql.records.replies_of, tenant_id, message_id)
        return [reply_of_row(row) for row in found]

    # -- governance -------------------------------------------------------------------------------

    async def approvals(
        self, where: ApprovalFilter, *, limit: int, after: str | None = None
    ) -> Sequence[Approval]:
        last = None if after is None else uuid_text(after)
        if after is not None and last is None:
            return []
        asked = (where.state, where.queue, where.rule, where.tenant_id)
        found = await self._read(self._sql.approvals.listed, limit, last, *asked)
        return [of_row(row) for row in found]

    async def approvals_named(
        self, name: str, *, tenant_id: str | None, limit: int
    ) -> Sequence[Approval]:
        sql = self._sql.approvals
        found = await self._named(sql.named, sql.named_like, name, tenant_id, limit)
        return [of_row(row) for row in found]

    async def quota_use(self, *, tenant_id: str | None = None) -> Sequence[QuotaUse]:
        return [
            quota_use_of_row(row)
            for row in await self._read(self._sql.records.quota_use, tenant_id)
        ]

    # -- counts -----------------------------------------------------------------------------------

    async def queues(self) -> Sequence[QueueState]:
        sql = self._sql.records
        fields: dict[str, dict[str, Any]] = {}
        oldest: dict[str, int] = {}

        def of(queue: str, at: int | None = None) -> dict[str, Any]:
            if at is not None:
                oldest[queue] = min(at, oldest.get(queue, at))
            return fields.setdefault(queue, {"ready": 0, "delayed": 0})

        for _, queue in await self._read(sql.queues):
            of(queue)
        sent = await self._sent()
        now_us = await self._now_us()
        for queue, ready, delayed, at in (*sent, *await self._read(sql.unsent, now_us)):
            state = of(queue, at)
            state["ready"] += ready
            state["delayed"] += delayed
        for queue, waiting, parked, at in await self._read(sql.unended, now_us):
            of(queue, at).update(waiting=waiting, parked=parked)
        for name, statement in (
            ("running", sql.running),
            ("dead", sql.open_letters),
            ("paused_at_us", sql.paused_queues),
        ):
            for queue, value in await self._read(statement):
                of(queue)[name] = value
        for queue, at in oldest.items():
            of(queue)["oldest_age_s"] = round(max(0.0, (now_us - at) / 1e6), 3)
        return [QueueState(queue=queue, **fields[queue]) for queue in sorted(fields)]

    async def counts(self) -> Sequence[Count]:
        return await self._counted(self._sql.records.task_counts)

    async def reply_counts(self) -> Sequence[Count]:
        return await self._counted(self._sql.records.reply_counts)

    async def event_counts(self, since_us: int) -> Sequence[Count]:
        return await self._counted(self._sql.records.event_counts, since_us)

    async def _counted(self, statement: str, *values: int) -> Sequence[Count]:
        found = await self._read(statement, *values)
        return [Count(queue=queue, kind=kind, count=count) for queue, kind, count in sorted(found)]

    async def workers(self) -> Sequence[WorkerState]:
        return [worker_of_row(row) for row in await self._read(self._sql.records.workers)]

    def _events(self, rows: Sequence[Row]) -> list[LedgerEvent]:
        return [event_of_row((self._position(row[0], row[1]), *row[1:])) for row in rows]

    # -- the dialect ------------------------------------------------------------------------------

    @abstractmethod
    async def waiting_with(self, text: str, *, limit: int) -> Sequence[Waiting]: ...

    @abstractmethod
    async def events_after(
        self, position: int, *, limit: int, since_us: int | None = None
    ) -> Sequence[LedgerEvent]: ...

    @abstractmethod
    async def last_position(self, *, back: int = 0) -> int: ...

    @abstractmethod
    def subscribe(self) -> asyncio.Event: ...

    @abstractmethod
    def unsubscribe(self, event: asyncio.Event) -> None: ...

    @abstractmethod
    async def _now_us(self) -> int:
        """The time of the store."""

    @abstractmethod
    async def _sent(self) -> list[Row]:
        """Queue, how many are ready, how many delayed, and when the oldest ready one was sent, for
        a broker whose queue this dialect can read."""

    def _place(self, number: int) -> Any:
        """The place of a parked task as its statement takes it."""
        return number

    def _place_number(self, place: Any) -> int:
        """The place of a parked task as a number."""
        return int(place)

    def _position(self, row: Any, at_us: int) -> int:
        """Position of an event in the ledger, from the first column of its row and its time."""
        return int(row)


def _values(where: LetterFilter) -> Iterator[Any]:
    """The parameters of a filter, in the order of `RecordsSql.letters`."""
    yield from (where.queue, where.reason, where.tenant_id, where.since_us, where.state)
    yield from (where.type, where.error, where.before_us)
