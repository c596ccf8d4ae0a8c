"""`PostgresRecords`: the store as operators look at it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ackbone.core import records
from ackbone.core.approvals import Approval, ApprovalFilter
from ackbone.core.clock import to_us
from ackbone.core.delivery_desk import DeliveryFilter, DeliveryRecord
from ackbone.core.quota import QuotaUse
from ackbone.core.records import LetterFilter
from ackbone.store.approvals import of_row
from ackbone.store.fleet import read_offers
from ackbone.store.quota_book import use_of_row
from ackbone.store.seen import (
    HIGHEST,
    event_of_row,
    letter_of_row,
    task_of_row,
    text_id,
    uuid_text,
)
from ackbone.store.stored import UNCOMMON

from . import approvals, delivery_desk, quotas, views
from .arrays import moment, texts
from .sql.approvals import COLUMNS
from .store import PostgresStore
from .tail import Tail, position_of
from .wake import OUTGOING, WORK

_HEX_BETWEEN = "replace(id::text, '-', '') BETWEEN $5::text AND $6::text"
_NAMED_SO = "(id = $1::uuid OR message_id = $4::text)"
_BEGIN_SO = f'(message_id COLLATE "C" BETWEEN $1::text AND $4::text OR {_HEX_BETWEEN})'


class PostgresRecords:
    """`Records` and `ApprovalRecords` of one database. The broker's queue is not in it."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._read = store.read
        self._tail = Tail(store)

    # -- dead letters -----------------------------------------------------------------------------

    async def letters(
        self, where: LetterFilter, *, limit: int, before: str | None = None
    ) -> Sequence[records.DeadLetter]:
        found = await self._read(
            f"{views.LETTER_HEAD} WHERE {views.LETTER_FILTER} AND ($2::text IS NULL"
            " OR id < $2::uuid) ORDER BY id DESC LIMIT $1::int",
            str(limit),
            before,
            *_filter(where),
        )
        return [letter_of_row(row) for row in found]

    async def letter_ids(self, where: LetterFilter, *, limit: int | None) -> Sequence[str]:
        found = await self._read(
            f"SELECT uuid_send(id) FROM dead_letters WHERE {views.LETTER_FILTER}"
            " AND $2::text IS NULL ORDER BY id LIMIT $1::bigint",
            None if limit is None else str(limit),
            None,
            *_filter(where),
        )
        return [text_id(row[0]) for row in found]

    async def letters_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[records.DeadLetter]:
        head = f"{views.LETTER} WHERE ($2::text IS NULL OR tenant_id = $2)"
        return [letter_of_row(row) for row in await self._named(head, name, tenant_id, limit)]

    async def _named(
        self, head: str, name: str, tenant_id: str | None, limit: int
    ) -> Sequence[Sequence[Any]]:
        """By row id or message id; if none is called so, those whose id begins so."""
        tail = " ORDER BY id DESC LIMIT $3::int"
        exact = await self._read(
            f"{head} AND {_NAMED_SO}{tail}", uuid_text(name), tenant_id, str(limit), name
        )
        if exact:
            return exact
        digits = name.replace("-", "").lower()
        return await self._read(
            f"{head} AND {_BEGIN_SO}{tail}",
            name,
            tenant_id,
            str(limit),
            name + HIGHEST,
            digits,
            digits + "g",
        )

    async def letters_by_id(self, ids: Sequence[str]) -> Sequence[records.DeadLetter]:
        wanted = [each for each in map(uuid_text, ids) if each is not None]
        found = await self._read(f"{views.LETTER} WHERE id = ANY($1::uuid[])", texts(wanted))
        letters = {letter.id: letter for letter in map(letter_of_row, found)}
        return [letters[each] for each in dict.fromkeys(ids) if each in letters]

    async def letters_of(self, tenant_id: str, message_id: str) -> Sequence[records.DeadLetter]:
        found = await self._read(
            f"{views.LETTER_HEAD} WHERE tenant_id = $1 AND (message_id = $2 OR replay_id = $2)"
            " ORDER BY id",
            tenant_id,
            message_id,
        )
        return [letter_of_row(row) for row in found]

    # -- tasks ------------------------------------------------------------------------------------

    async def parked(
        self,
        *,
        queue: str | None = None,
        kind: str | None = None,
        tenant_id: str | None = None,
        limit: int,
        before: int | None = None,
    ) -> Sequence[tuple[int, records.Task]]:
        # The second condition on status is the one of a partial index: with it, the index is used.
        found = await self._read(
            f"{views.TASK_HEAD} WHERE status = 'parked' AND {UNCOMMON}"
            " AND ($1::text IS NULL OR queue_name = $1) AND ($2::text IS NULL OR parked_kind = $2)"
            " AND ($3::text IS NULL OR tenant_id = $3) AND ($4::text IS NULL OR id < $4::uuid)"
            " ORDER BY id DESC LIMIT $5::int",
            queue,
            kind,
            tenant_id,
            None if before is None else text_id(before.to_bytes(16, "big")),
            str(limit),
        )
        return [(int.from_bytes(row[0], "big"), task_of_row(row)) for row in found]

    async def tasks(self, tenant_id: str | None, message_id: str) -> Sequence[records.Task]:
        found: list[records.Task] = []
        for tenant in await self._tenants("queue_executions", tenant_id):
            rows = await self._read(
                f"{views.TASK} WHERE tenant_id = $1 AND message_id = $2 ORDER BY id",
                tenant,
                message_id,
            )
            found += [task_of_row(row) for row in rows]
        return found

    async def tasks_like(
        self, prefix: str, *, tenant_id: str | None, status: str | None, limit: int
    ) -> Sequence[records.Task]:
        found: list[records.Task] = []
        for tenant in await self._tenants("queue_executions", tenant_id):
            rows = await self._read(
                f'{views.TASK_HEAD} WHERE tenant_id = $1 AND message_id COLLATE "C" BETWEEN'
                " $2::text AND $3::text AND ($4::text IS NULL OR status = $4)"
                " ORDER BY message_id LIMIT $5::int",
                tenant,
                prefix,
                prefix + HIGHEST,
                status,
                str(limit - len(found)),
            )
            found += [task_of_row(row) for row in rows]
        return found

    async def tasks_correlated(self, correlation_id: str, *, limit: int) -> Sequence[records.Task]:
        found = await self._read(
            f"{views.TASK_HEAD} WHERE correlation_id = $1 ORDER BY id LIMIT $2::int",
            correlation_id,
            str(limit),
        )
        return [task_of_row(row) for row in found]

    async def find(
        self, name: str, *, tenant_id: str | None, limit: int
    ) -> Sequence[records.Found]:
        """Messages called so, else those whose id begins so, else those that belong to it."""
        sources = {"queue_executions": "message_id", "event_log": "task_id"}
        for by, high in (("id", name), ("prefix", name + HIGHEST)):
            found: dict[tuple[str, str], records.Found] = {}
            for table, column in sources.items():
                condition = (
                    "= $2::text AND $3::text <> ''"
                    if by == "id"
                    else ('COLLATE "C" BETWEEN $2::text AND $3::text')
                )
                for tenant in await self._tenants(table, tenant_id):
                    rows = await self._read(
                        f"SELECT DISTINCT {column} FROM {table} WHERE tenant_id = $1"
                        f" AND {column} {condition} LIMIT $4::int",
                        tenant,
                        name,
                        high,
                        str(limit),
                    )
                    for (message_id,) in rows:
                        key = (tenant, message_id)
                        found[key] = records.Found(tenant_id=tenant, message_id=message_id, by=by)
            if found:
                return sorted(found.values(), key=lambda each: each.message_id)[:limit]
        rows = await self._read(views.BELONGS, name, tenant_id, str(limit))
        return [records.Found(tenant_id=t, message_id=m, by=by) for t, m, by in rows]

    async def _tenants(self, table: str, given: str | None) -> list[str]:
        if given is not None:
            return [given]
        return [name for (name,) in await self._read(views.TENANTS.format(table))]

    # -- approvals --------------------------------------------------------------------------------

    async def approvals(
        self, where: ApprovalFilter, *, limit: int, after: str | None = None
    ) -> Sequence[Approval]:
        return await approvals.listed(self._store, where, limit, after)

    async def approvals_named(
        self, name: str, *, tenant_id: str | None, limit: int
    ) -> Sequence[Approval]:
        head = f"SELECT {COLUMNS} FROM approvals WHERE ($2::text IS NULL OR tenant_id = $2)"
        return [of_row(row) for row in await self._named(head, name, tenant_id, limit)]

    async def quota_use(self, *, tenant_id: str | None = None) -> Sequence[QuotaUse]:
        return [use_of_row(row) for row in await self._read(quotas.USE, tenant_id)]

    # -- what belongs to a message ----------------------------------------------------------------

    async def events_of(self, tenant_id: str, message_id: str) -> Sequence[records.LedgerEvent]:
        rows = await self._read(
            f"{views.EVENT} WHERE tenant_id = $1 AND task_id = $2 ORDER BY created_at, id",
            tenant_id,
            message_id,
        )
        return [event_of_row((position_of(row[0], row[1]), *row[1:])) for row in rows]

    async def effects_of(self, tenant_id: str, message_id: str) -> Sequence[records.Effect]:
        return [
            records.Effect(name=n, state=s, value=v, worker_id=w, begun_at_us=begun, done_at_us=end)
            for n, s, v, w, begun, end in await self._read(views.EFFECT, tenant_id, message_id)
        ]

    async def replies_of(self, tenant_id: str, message_id: str) -> Sequence[records.Reply]:
        rows = await self._read(
            f"{views.REPLY} WHERE tenant_id = $1 AND task_id = $2 ORDER BY created_at, id",
            tenant_id,
            message_id,
        )
        names = records.Reply.__struct_fields__
        return [records.Reply(**dict(zip(names, row, strict=True))) for row in rows]

    async def waiting_with(self, text: str, *, limit: int) -> Sequence[records.Waiting]:
        """The broker's queue is elsewhere, and cannot be searched from here."""
        return []

    # -- replies ----------------------------------------------------------------------------------

    async def deliveries(self, where: DeliveryFilter, *, limit: int) -> Sequence[DeliveryRecord]:
        return await delivery_desk.listed(self._read, where, limit)

    async def delivery_ids(self, where: DeliveryFilter, *, limit: int | None) -> Sequence[str]:
        return await delivery_desk.ids(self._read, where, limit)

    async def deliveries_named(
        self, name: str, *, tenant_id: str | None, limit: int = 20
    ) -> Sequence[DeliveryRecord]:
        return await delivery_desk.named(self._read, name, tenant_id, limit)

    async def paused_channels(self) -> frozenset[str]:
        return await delivery_desk.paused(self._read)

    # -- counts -----------------------------------------------------------------------------------

    async def queues(self) -> Sequence[records.QueueState]:
        fields: dict[str, dict[str, Any]] = {}

        def of(queue: str) -> dict[str, Any]:
            return fields.setdefault(queue, {})

        def older(queue: str, at: datetime | None) -> None:
            if at is not None:
                age_s = round(max(0.0, (to_us(now) - to_us(at)) / 1e6), 3)
                of(queue)["oldest_age_s"] = max(age_s, of(queue).get("oldest_age_s", 0.0))

        for _, queue in await self._read(views.QUEUES):
            of(queue)
        ((now,),) = await self._read("SELECT clock_timestamp()")
        for queue, ready, delayed, at in await self._read(views.UNSENT):
            of(queue).update(ready=ready, delayed=delayed)
            older(queue, at)
        for queue, waiting, parked, at in await self._read(views.UNENDED):
            of(queue).update(waiting=waiting, parked=parked)
            older(queue, at)
        for queue, running in await self._read(
            "SELECT queue_name, count(*) FROM queue_executions WHERE status = 'running'"
            " GROUP BY queue_name"
        ):
            of(queue).update(running=running)
        for queue, dead in await self._read(
            "SELECT queue_name, count(*) FROM dead_letters WHERE state = 'open' GROUP BY queue_name"
        ):
            of(queue).update(dead=dead)
        for queue, paused_at in await self._read(
            f"SELECT subscription, {views.us('max(paused_at)')} FROM sources GROUP BY subscription"
        ):
            of(queue).update(paused_at_us=paused_at)
        return [records.QueueState(queue=queue, **fields[queue]) for queue in sorted(fields)]

    async def counts(self) -> Sequence[records.Count]:
        return await self._counted(
            "SELECT queue_name, status, count(*) FROM queue_executions GROUP BY 1, 2"
        )

    async def reply_counts(self) -> Sequence[records.Count]:
        return await self._counted("SELECT channel, status, count(*) FROM deliveries GROUP BY 1, 2")

    async def event_counts(self, since_us: int) -> Sequence[records.Count]:
        return await self._counted(
            "SELECT subscription, event_type, count(*) FROM event_log"
            f" WHERE created_at >= {moment('$1::bigint')} GROUP BY 1, 2",
            str(since_us),
        )

    async def _counted(self, statement: str, *values: str) -> Sequence[records.Count]:
        found = await self._read(statement, *values)
        return sorted(
            (records.Count(queue=queue, kind=kind, count=count) for queue, kind, count in found),
            key=lambda each: (each.queue, each.kind),
        )

    async def workers(self) -> Sequence[records.WorkerState]:
        return [
            records.WorkerState(
                worker_id=worker_id,
                name=name,
                started_at_us=at,
                alive=alive,
                running=running,
                offers=read_offers(offers),
            )
            for worker_id, name, at, alive, running, offers in await self._read(views.WORKERS)
        ]

    # -- the ledger as it grows -------------------------------------------------------------------

    async def events_after(
        self, position: int, *, limit: int, since_us: int | None = None
    ) -> Sequence[records.LedgerEvent]:
        return await self._tail.after(position, limit, since_us)

    async def last_position(self, *, back: int = 0) -> int:
        return await self._tail.last(back)

    def subscribe(self) -> asyncio.Event:
        return self._store.subscribe_to(WORK, OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)


def _filter(where: LetterFilter) -> tuple[Any, ...]:
    since, before = (None if us is None else str(us) for us in (where.since_us, where.before_us))
    return (
        where.queue,
        where.reason,
        where.tenant_id,
        since,
        where.state,
        where.type,
        where.error,
        before,
    )
