"""Keys, conversations and quotas on PostgreSQL, and the tasks that wait for them.

Keys are locked after tasks, sorted, and quotas after keys, before the ledger. The one fetcher of a
source holds its row while it writes a batch, so that numbers are given out and seen in one order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ackbone.core.store import Finished
from ackbone.pgserver import arrays
from ackbone.pgserver.arrays import BEGUN, moment, us
from ackbone.store.conditions import ENDED, none_of
from ackbone.store.quota_book import COLUMNS
from ackbone.store.tables import Holder, Pair, QuotaName, Waiter, Wanted
from ackbone.store.unit import Identity, Key, Lane

from .sql import SQL

if TYPE_CHECKING:
    from .database import Tx

_TAKE = (
    "INSERT INTO idempotency_keys AS k (tenant_id, subscription, key, message_id, state,"
    " created_at) SELECT u.tenant, $1, u.key, u.message, 'running', clock_timestamp()"
    " FROM unnest($3::text[], $4::text[], $5::text[]) u(tenant, key, message)"
    " ON CONFLICT (tenant_id, subscription, key) DO UPDATE SET message_id = excluded.message_id,"
    " state = 'running', value = NULL, expires_at = NULL"
    " WHERE k.message_id = excluded.message_id OR (k.state = 'done' AND $2::bool"
    f" AND k.expires_at <= {BEGUN}) RETURNING tenant_id, key, message_id"
)
"""Sorted by key; one row per key."""
_HOLDERS = (
    "SELECT k.tenant_id, k.key, k.message_id, k.state, k.value"
    " FROM unnest($2::text[], $3::text[]) u(tenant, key) JOIN idempotency_keys k"
    " ON k.tenant_id = u.tenant AND k.subscription = $1 AND k.key = u.key"
)
KEEP = (
    "UPDATE idempotency_keys k SET state = 'done', value = u.value,"
    f" expires_at = {BEGUN} + u.window_us * interval '1 microsecond'"
    " FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bigint[])"
    " u(tenant, sub, key, message, value, window_us) WHERE k.tenant_id = u.tenant"
    " AND k.subscription = u.sub AND k.key = u.key AND k.message_id = u.message"
)
FREE = (
    "DELETE FROM idempotency_keys k USING unnest($1::text[], $2::text[], $3::text[], $4::text[])"
    " u(tenant, sub, key, message) WHERE k.tenant_id = u.tenant AND k.subscription = u.sub"
    " AND k.key = u.key AND k.message_id = u.message"
)
_WAITING = (
    "SELECT q.tenant_id, q.subscription, q.message_id, q.queue_name, q.event_name, q.trace_id,"
    " q.idem_key, q.lane, k.message_id, k.state, k.value FROM {} LEFT JOIN idempotency_keys k"
    " ON k.tenant_id = q.tenant_id AND k.subscription = q.subscription AND k.key = q.idem_key"
    " WHERE q.status = 'waiting_key' AND (k.state IS NULL OR k.state = 'done')"
    " ORDER BY q.id LIMIT 500 FOR UPDATE OF q SKIP LOCKED"
)
WAITING_FOR = _WAITING.format(
    "unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, key) JOIN queue_executions q"
    " ON q.tenant_id = u.tenant AND q.subscription = u.sub AND q.idem_key = u.key"
    " AND q.status = 'waiting_key'"
)
WAITING = _WAITING.format("queue_executions q")
_DUPLICATES = (
    "UPDATE queue_executions q SET status = 'duplicate', completed_at = clock_timestamp(),"
    " result = u.value, body = NULL, body_info = NULL FROM unnest($1::text[], $2::text[],"
    " $3::text[], $4::bytea[]) u(tenant, sub, message, value) WHERE q.tenant_id = u.tenant"
    " AND q.subscription = u.sub AND q.message_id = u.message"
)
_READY = (
    f"UPDATE queue_executions q SET status = 'ready', due_at = {BEGUN}"
    " FROM unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, message)"
    " WHERE q.tenant_id = u.tenant AND q.subscription = u.sub AND q.message_id = u.message"
    " AND q.status = 'waiting_key'"
)


class PostgresKeyRows:
    """`KeyRows` in one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    async def take(
        self, subscription: str, wanted: Sequence[Wanted], *, expiry: bool
    ) -> Mapping[Pair, Holder]:
        first: dict[Pair, Wanted] = {}
        for each in wanted:
            first.setdefault((each.tenant_id, each.key), each)
        asked = [first[key] for key in sorted(first)]
        found = await self._tx.rows(
            _TAKE,
            subscription,
            expiry,
            arrays.texts([each.tenant_id for each in asked]),
            arrays.texts([each.key for each in asked]),
            arrays.texts([each.message_id for each in asked]),
        )
        won = {(tenant_id, message_id) for tenant_id, _, message_id in found}
        losers = [each for each in wanted if (each.tenant_id, each.message_id) not in won]
        if not losers:
            return {}
        holders = {
            (tenant_id, key): Holder(message_id, state, value)
            for tenant_id, key, message_id, state, value in await self._tx.rows(
                _HOLDERS,
                subscription,
                arrays.texts([each.tenant_id for each in losers]),
                arrays.texts([each.key for each in losers]),
            )
        }
        return {(each.tenant_id, each.message_id): holders[each[:2]] for each in losers}

    def keep(self, done: Sequence[Finished]) -> None:
        named = [
            ((item.run.message.tenant_id, item.run.subscription, item.run.idem_key or ""), n)
            for n, item in enumerate(done)
        ]
        named.sort()
        found = [(key, done[n]) for key, n in named]
        self._tx.before_end(
            KEEP,
            *arrays.columns([key for key, _ in found]),
            arrays.texts([item.run.message.id for _, item in found]),
            arrays.blobs(item.result for _, item in found),
            arrays.numbers(int(item.dedup_window_s * 1e6) for _, item in found),
        )

    def free(self, keys: Sequence[tuple[Key, str]]) -> None:
        found = sorted(keys)
        ids = arrays.texts([message_id for _, message_id in found])
        self._tx.before_end(FREE, *arrays.columns([key for key, _ in found]), ids)

    async def waiting(self, keys: Collection[Key] | None) -> Sequence[Waiter]:
        if keys is None:
            rows = await self._tx.rows(WAITING)
        else:
            rows = await self._tx.rows(WAITING_FOR, *arrays.columns(sorted(keys)))
        return [Waiter(*row) for row in rows]

    async def end_as_duplicates(self, ended: Sequence[tuple[Identity, bytes | None]]) -> None:
        found = sorted(ended, key=lambda each: each[0])
        results = arrays.blobs(result for _, result in found)
        await self._tx.send(_DUPLICATES, *arrays.columns([task for task, _ in found]), results)

    async def make_ready(self, tasks: Sequence[Identity]) -> None:
        await self._tx.send(_READY, *arrays.columns(sorted(tasks)))


_ALIVE = "SELECT state FROM workers WHERE worker_id = $1::bigint FOR SHARE"
OWNER = (
    "SELECT s.worker_id FROM sources s JOIN workers w ON w.worker_id = s.worker_id"
    " WHERE s.subscription = $1 AND s.part = '' AND w.state = 'alive'"
)
_LEAD = "SELECT pg_try_advisory_xact_lock(hashtextextended($1, 7310579635104524))"
_BUSY = (
    "SELECT u.tenant, u.lane FROM unnest($2::text[], $3::text[]) u(tenant, lane)"
    " WHERE EXISTS (SELECT 1 FROM queue_executions q WHERE q.tenant_id = u.tenant"
    " AND q.subscription = $1 AND q.lane = u.lane AND q.lane IS NOT NULL"
    f" AND {none_of(*ENDED, column='q.status')})"
)
_ADVANCE = (
    f"UPDATE queue_executions q SET status = 'ready', due_at = {BEGUN}"
    " FROM unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, lane)"
    " CROSS JOIN LATERAL (SELECT f.message_id, f.status FROM queue_executions f"
    " WHERE f.tenant_id = u.tenant AND f.subscription = u.sub AND f.lane = u.lane"
    f" AND f.lane IS NOT NULL AND {none_of(*ENDED, column='f.status')}"
    " ORDER BY f.lane_seq LIMIT 1) h"
    " WHERE h.status = 'queued' AND q.tenant_id = u.tenant AND q.subscription = u.sub"
    " AND q.message_id = h.message_id AND q.status = 'queued' RETURNING 1"
)


class PostgresLaneRows:
    """`LaneRows` in one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    async def own_source(self, subscription: str, worker_id: int) -> bool:
        # The worker's own row is held until the end: a reaper must not give the source to another
        # worker while a batch of the old fetcher is under way.
        if await self._tx.rows(_ALIVE, worker_id) != [("alive",)]:
            return False
        return bool(await self._tx.rows(SQL.claims.own_source, subscription, worker_id))

    async def lead(self, subscription: str) -> bool:
        ((leads,),) = await self._tx.rows(_LEAD, subscription)
        return bool(leads)

    async def busy(self, subscription: str, lanes: Collection[Pair]) -> set[Pair]:
        found = await self._tx.rows(_BUSY, subscription, *arrays.columns(sorted(lanes)))
        return {(tenant_id, lane) for tenant_id, lane in found}

    async def advance(self, lanes: Collection[Lane]) -> int:
        return len(await self._tx.rows(_ADVANCE, *arrays.columns(sorted(lanes))))


_SEEN = (
    f"q.window_us, {us('q.window_start')}, q.runs, q.llm_calls, q.tokens, q.cost,"
    f" {us('q.deferred_until')}, q.deferred"
)
_MAKE = (
    "INSERT INTO quotas (tenant_id, name, window_us, window_start)"
    " SELECT u.tenant, u.name, 0, timestamptz 'epoch' FROM unnest($1::text[], $2::text[])"
    " u(tenant, name) ON CONFLICT (tenant_id, name) DO NOTHING"
)
"""Sorted. A window of no length belongs to no quota: the next look starts a new one."""
_READ = (
    f"SELECT q.tenant_id, q.name, {_SEEN} FROM unnest($1::text[], $2::text[]) u(tenant, name)"
    " JOIN quotas q ON q.tenant_id = u.tenant AND q.name = u.name FOR UPDATE OF q"
)
_WRITE = (
    f"UPDATE quotas q SET ({COLUMNS}) = (u.window_us, {moment('u.start')}, u.runs, u.llm_calls,"
    f" u.tokens, u.cost, {moment('u.until')}, u.deferred)"
    " FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],"
    " $7::bigint[], $8::float8[], $9::bigint[], $10::bigint[]) u(tenant, name, window_us, start,"
    " runs, llm_calls, tokens, cost, until, deferred)"
    " WHERE q.tenant_id = u.tenant AND q.name = u.name"
)


class PostgresQuotaRows:
    """`QuotaRows` in one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    async def lock(self, names: Sequence[QuotaName]) -> Mapping[QuotaName, Sequence[Any]]:
        columns = arrays.columns(names)
        await self._tx.send_locking()  # keys come before quotas, in a finish, too
        await self._tx.send(_MAKE, *columns)
        rows = await self._tx.rows(_READ, *columns)
        return {(tenant_id, name): row for tenant_id, name, *row in rows if row[0]}

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        columns = list(zip(*rows, strict=True))
        self._tx.at_end(
            _WRITE,
            arrays.texts(columns[0]),
            arrays.texts(columns[1]),
            *(arrays.numbers(column) for column in columns[2:]),
        )
