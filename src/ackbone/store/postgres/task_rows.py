"""`queue_executions` on PostgreSQL: statements over many rows, given as arrays.

Batches are sorted by identity, so that two of them lock their rows in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ackbone.core.clock import to_us
from ackbone.core.ids import uuid7_block
from ackbone.core.outcome import Done
from ackbone.core.store import Finished, Run
from ackbone.pgserver import arrays
from ackbone.pgserver.arrays import BEGUN, NOW, moment
from ackbone.store.claiming import Choice
from ackbone.store.conditions import ENDED, none_of
from ackbone.store.outcomes import duration_ms, identity_of, run_uuid, write_of
from ackbone.store.tables import Pair, Placed
from ackbone.store.tasks import Existing, Ready, Task, crc, run_info
from ackbone.store.unit import Identity, Row

if TYPE_CHECKING:
    from ackbone.store.claiming import Claiming

    from .database import Tx

Claimed = tuple[str, str, str, int, int]
"""Which claim a run has: the identity of its task, and its token."""

_CLAIM = (
    # A copy of an existing task changes nothing, but locks its row: the answer to it stays true.
    "INSERT INTO queue_executions AS t (subscription, queue_name, worker_id, status, held, epoch,"
    " attempt, started_at, id, tenant_id, message_id, event_name, priority, idem_key, created_at,"
    " expires_at, correlation_id, trace_id, body_sha256{columns})"
    " SELECT $1, $2, $3::bigint, 'running', '{held}', 1, 1, clock_timestamp(), u.id, u.tenant,"
    f" u.message, u.type, u.priority, u.key, {moment('u.created')}, {moment('u.expires')},"
    " u.correlation, u.trace, u.sha{values}"
    " FROM unnest($5::uuid[], $6::text[], $7::text[], $8::text[], $9::int[], $10::text[],"
    " $11::bigint[], $12::bigint[], $13::text[], $14::text[], $15::bytea[]{arrays})"
    " u(id, tenant, message, type, priority, key, created, expires, correlation, trace, sha{names})"
    " ON CONFLICT (tenant_id, subscription, message_id) DO UPDATE SET status = 'running',"
    " worker_id = excluded.worker_id, epoch = t.epoch + 1, attempt = t.attempt + 1"
    " WHERE t.status = 'open' AND t.crashes < $4::int AND t.body_sha256 = excluded.body_sha256"
    " AND t.event_name = excluded.event_name"
    " RETURNING tenant_id, message_id, epoch, attempt, crashes, history::text, t.ctid, t.lost_by"
)
CLAIM = {
    "broker": _CLAIM.format(held="broker", columns="", values="", arrays="", names=""),
    "store": _CLAIM.format(
        held="store",
        columns=", body, body_info, body_crc",
        values=", u.body, u.info, u.crc",
        arrays=", $16::bytea[], $17::json[], $18::bigint[]",
        names=", body, info, crc",
    ),
}
"""By who holds the message while it runs. Sorted by identity; one row per identity."""
FIND = (
    "SELECT t.tenant_id, t.message_id, t.status, t.held, t.body_sha256, t.event_name,"
    " t.worker_id, t.epoch"
    " FROM unnest($2::text[], $3::text[]) u(tenant, message) JOIN queue_executions t"
    " ON t.tenant_id = u.tenant AND t.subscription = $1 AND t.message_id = u.message"
)
LOCK = (
    "SELECT t.tenant_id, t.message_id, t.worker_id, t.epoch, t.status"
    " FROM unnest($2::text[], $3::text[]) u(tenant, message) JOIN queue_executions t"
    " ON t.tenant_id = u.tenant AND t.subscription = $1 AND t.message_id = u.message"
    " FOR UPDATE OF t"
)
_APPEND = (
    "INSERT INTO queue_executions (subscription, queue_name, held, started_at, due_at, id,"
    " tenant_id, message_id, event_name, priority, idem_key, created_at, expires_at,"
    " correlation_id, trace_id, body_sha256, status, lane, lane_seq, body, body_info, body_crc)"
    f" SELECT $1, $2, 'store', clock_timestamp(), {BEGUN}, u.id, u.tenant, u.message,"
    f" u.type, u.priority, u.key, {moment('u.created')}, {moment('u.expires')}, u.correlation,"
    " u.trace, u.sha, u.status, u.lane, u.lane_seq, u.body, u.info, u.crc"
    " FROM unnest($3::uuid[], $4::text[], $5::text[], $6::text[], $7::int[], $8::text[],"
    " $9::bigint[], $10::bigint[], $11::text[], $12::text[], $13::bytea[], $14::text[],"
    " $15::text[], $16::bigint[], $17::bytea[], $18::json[], $19::bigint[])"
    " u(id, tenant, message, type, priority, key, created, expires, correlation, trace, sha,"
    " status, lane, lane_seq, body, info, crc)"
    " ON CONFLICT (tenant_id, subscription, message_id) DO NOTHING"
    " RETURNING tenant_id, message_id"
)
_READY_COLUMNS = (
    "q.tenant_id, q.message_id, q.epoch, q.attempt, q.crashes, q.lane, q.idem_key, q.expires_at,"
    " q.history::text, q.body, q.body_info::text, q.body_crc, q.lost_by, q.priority, q.due_at"
)
_HEAD = (
    "(a.lane IS NULL OR NOT EXISTS (SELECT 1 FROM queue_executions b"
    " WHERE b.tenant_id = a.tenant_id AND b.subscription = a.subscription AND b.lane = a.lane"
    f" AND b.lane_seq < a.lane_seq AND {none_of(*ENDED, column='b.status')}))"
)
_CHOSEN = {
    "all": "",
    "only": " AND a.event_name = ANY({}::text[])",
    "but": " AND a.event_name <> ALL({}::text[])",
}
"""By the rule of a `Choice`, the condition that follows it."""
CLAIM_READY = {
    rule: "WITH due AS MATERIALIZED (SELECT d.* FROM unnest($6::int[]) p(priority)"
    " CROSS JOIN LATERAL (SELECT a.tenant_id, a.subscription, a.message_id FROM queue_executions a"
    " WHERE a.subscription = $1 AND a.status = 'ready' AND a.priority = p.priority"
    f" AND a.due_at <= {NOW} AND a.crashes BETWEEN $3::int AND $4::int{condition.format('$7')}"
    f" AND {_HEAD}"
    " ORDER BY a.due_at LIMIT $5::int FOR UPDATE OF a SKIP LOCKED) d LIMIT $5::int)"
    " UPDATE queue_executions q SET status = 'running', worker_id = $2::bigint,"
    " epoch = q.epoch + 1, attempt = q.attempt + 1 FROM due WHERE q.tenant_id = due.tenant_id"
    " AND q.subscription = due.subscription AND q.message_id = due.message_id"
    f" RETURNING {_READY_COLUMNS}"
    for rule, condition in _CHOSEN.items()
}
READY_HEADS = {
    rule: "SELECT count(*) FROM (SELECT 1 FROM queue_executions a WHERE a.subscription = $1"
    " AND a.status = 'ready' AND a.priority IN (0, 1, 2, 3)"
    f" AND a.due_at <= {NOW} AND a.crashes = 0 AND a.lane IS NOT NULL{condition.format('$3')}"
    " LIMIT $2::int) h"
    for rule, condition in _CHOSEN.items()
}
APPROVED = (
    "SELECT a.tenant_id, a.message_id, a.id::text, a.rule, a.payload_sha256"
    " FROM unnest($2::text[], $3::text[]) u(tenant, message) JOIN approvals a"
    " ON a.tenant_id = u.tenant AND a.message_id = u.message AND a.subscription = $1"
    " WHERE a.state = 'approved'"
)
_IDENTITY = "t.tenant_id = u.tenant AND t.subscription = u.sub AND t.message_id = u.message"
_IF_OWNED = (
    # Not `t.status = 'running'`: all running rows would be read for each one, by their index.
    " AND t.worker_id = u.worker AND CASE t.status WHEN 'running' THEN t.epoch END = u.epoch"
    " RETURNING t.tenant_id, t.subscription, t.message_id, t.worker_id, t.epoch, t.held"
)
_RUNS = "$1::text[], $2::text[], $3::text[], $4::bigint[], $5::int[]"
_RUN_NAMES = "tenant, sub, message, worker, epoch"
_DONE = (
    "UPDATE queue_executions t SET status = 'succeeded', result = u.result,"
    " completed_at = clock_timestamp(), duration_ms = u.duration, agent_run_id = u.run_id,"
    " retry_count = u.failures, body = NULL, body_info = NULL, due_at = NULL"
    f" FROM unnest({_RUNS}, $6::bytea[], $7::int[], $8::uuid[], $9::int[]{{}})"
    f" u({_RUN_NAMES}, result, duration, run_id, failures{{}}) WHERE {{}}{_IF_OWNED}"
)
ALL_DONE = _DONE.format("", "", _IDENTITY)
DONE_IN_PLACE = _DONE.format(
    ", $10::tid[]",
    ", place",
    # In words that no index is used for: a plan made while the table is empty takes any of them.
    "t.ctid = u.place AND (t.tenant_id, t.subscription, t.message_id)"
    " IS NOT DISTINCT FROM (u.tenant, u.sub, u.message)",
)
"""Where the claim put them. A row that was written meanwhile is elsewhere now, and not found."""
OTHERS = (
    "UPDATE queue_executions t SET status = CASE WHEN u.status = 'handed back' THEN CASE t.held"
    " WHEN 'store' THEN 'ready' ELSE 'open' END ELSE u.status END,"
    " held = CASE WHEN u.hold THEN 'store' ELSE t.held END,"
    " body = CASE WHEN u.hold THEN coalesce(t.body, u.body) WHEN u.ended THEN NULL ELSE t.body END,"
    " body_info = CASE WHEN u.hold THEN coalesce(t.body_info::text, u.info)::json"
    " ELSE t.body_info END,"
    " body_crc = CASE WHEN u.hold THEN coalesce(t.body_crc, u.crc) ELSE t.body_crc END,"
    " completed_at = CASE WHEN u.ended THEN clock_timestamp() ELSE t.completed_at END,"
    " due_at = CASE WHEN u.wait_us IS NULL THEN t.due_at"
    f" ELSE {BEGUN} + u.wait_us * interval '1 microsecond' END,"
    " duration_ms = coalesce(u.duration, t.duration_ms),"
    " retry_count = coalesce(u.failures, t.retry_count),"
    " error_message = coalesce(u.error, t.error_message),"
    " history = coalesce(u.history, t.history::text)::json,"
    " parked_kind = coalesce(u.parked, t.parked_kind), attempt = t.attempt - u.given_back,"
    " crashes = t.crashes + u.crashed, lane = CASE WHEN u.leave THEN NULL ELSE t.lane END"
    f" FROM unnest({_RUNS}, $6::text[], $7::bool[], $8::bool[], $9::bytea[], $10::text[],"
    " $11::bigint[], $12::bigint[], $13::int[], $14::int[], $15::text[], $16::text[], $17::text[],"
    f" $18::int[], $19::int[], $20::bool[]) u({_RUN_NAMES}, status, hold, ended, body, info, crc,"
    " wait_us, duration, failures, error, history, parked, given_back, crashed, leave)"
    f" WHERE {_IDENTITY}{_IF_OWNED}"
)
_WHY_NOT = (
    "SELECT t.tenant_id, t.subscription, t.message_id, t.worker_id, t.epoch, t.status"
    " FROM unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, message)"
    " JOIN queue_executions t ON t.tenant_id = u.tenant AND t.subscription = u.sub"
    " AND t.message_id = u.message"
)


class PostgresTaskRows:
    """`TaskRows` in one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    # -- claim ------------------------------------------------------------------------------------

    async def claim(self, claim: Claiming, new: Sequence[Task]) -> Sequence[Task]:
        named = [(t.message.tenant_id, t.message.id, n) for n, t in enumerate(new)]
        order = [n for _, _, n in sorted(named)]
        rows = await self._tx.rows(
            CLAIM[claim.held],
            claim.sub.name,
            claim.sub.queue,
            claim.worker.worker_id,
            claim.most_crashes + 1,
            *_claim_values(new, order),
            *(_bodies(new, order) if claim.held == "store" else ()),
        )
        found = {(row[0], row[1]): row[2:] for row in rows}
        granted = []
        for task in new:
            row = found.get((task.message.tenant_id, task.message.id))
            if row is not None:
                task.epoch, task.attempt, task.crashes, task.history, ctid, task.lost_by = row
                task.row = arrays.place_of(ctid)
                granted.append(task)
        return granted

    async def find(self, subscription: str, pairs: Sequence[Pair]) -> Mapping[Pair, Existing]:
        rows = await self._tx.rows(FIND, subscription, *arrays.columns(pairs))
        return {(row[0], row[1]): Existing(*row[2:]) for row in rows}

    async def lock(self, subscription: str, pairs: Sequence[Pair]) -> None:
        await self._tx.rows(LOCK, subscription, *arrays.columns(pairs))

    async def append(self, claim: Claiming, placed: Sequence[Placed]) -> Sequence[Task]:
        tasks = [each.task for each in placed]
        named = [(t.message.tenant_id, t.message.id, n) for n, t in enumerate(tasks)]
        order = [n for _, _, n in sorted(named)]
        rows = await self._tx.rows(
            _APPEND,
            claim.sub.name,
            claim.sub.queue,
            *_claim_values(tasks, order),
            arrays.texts([placed[n].status for n in order]),
            arrays.texts([tasks[n].message.ordering_key for n in order]),
            arrays.numbers(placed[n].lane_seq for n in order),
            *_bodies(tasks, order),
        )
        found = {(tenant_id, message_id) for tenant_id, message_id in rows}
        return [task for task in tasks if (task.message.tenant_id, task.message.id) in found]

    async def claim_due(
        self,
        claim: Claiming,
        *,
        choice: Choice,
        crashes: tuple[int, int],
        priorities: Sequence[int],
        limit: int,
    ) -> Sequence[Ready]:
        rows = await self._tx.rows(
            CLAIM_READY[choice.rule],
            claim.sub.name,
            claim.worker.worker_id,
            *crashes,
            limit,
            arrays.numbers(priorities),
            *(() if choice.rule == "all" else (arrays.texts(choice.types),)),
        )
        rows.sort(key=lambda row: (-row[13], row[14]))
        return [_ready(row) for row in rows]

    async def ready_heads(self, claim: Claiming, choice: Choice, limit: int) -> int:
        types = () if choice.rule == "all" else (arrays.texts(choice.types),)
        ((found,),) = await self._tx.rows(READY_HEADS[choice.rule], claim.sub.name, limit, *types)
        return int(found)

    async def approved(self, subscription: str, pairs: Sequence[Pair]) -> Sequence[Row]:
        return await self._tx.rows(APPROVED, subscription, *arrays.columns(pairs))

    # -- finish -----------------------------------------------------------------------------------

    async def finish(self, batch: Sequence[Finished]) -> list[str | None]:
        # A claim that a crash of the server took back may have been granted again while its run
        # went on. Both runs have the same token then: the first one to end is the one that counts.
        first: dict[Claimed, int] = {}
        for n, item in enumerate(batch):
            first.setdefault(_claimed(item), n)
        ends = [batch[n] for _, n in sorted(first.items())]
        done = [item for item in ends if type(item.outcome) is Done]
        others = [item for item in ends if type(item.outcome) is not Done]
        written: dict[Claimed, str] = {}
        if done:
            written |= await self._write_done(done)
        if others:
            written |= await self._write_others(others)
        holders: list[str | None] = [None] * len(batch)
        for claimed, held in written.items():
            holders[first[claimed]] = held
        return holders

    async def _write_done(self, batch: Sequence[Finished]) -> dict[Claimed, str]:
        written: dict[Claimed, str] = {}
        placed = [item for item in batch if item.run.row]
        if placed:
            places = arrays.places(item.run.row for item in placed)
            rows = await self._tx.rows(DONE_IN_PLACE, *_done_values(placed), places)
            written |= _who_holds(rows)
        moved = [item for item in batch if _claimed(item) not in written]
        if moved:
            written |= _who_holds(await self._tx.rows(ALL_DONE, *_done_values(moved)))
        return written

    async def _write_others(self, batch: Sequence[Finished]) -> dict[Claimed, str]:
        now_us = await self._tx.moment()
        writes = [write_of(item, now_us) for item in batch]
        held = [item.run if write.hold else None for item, write in zip(batch, writes, strict=True)]
        rows = await self._tx.rows(
            OTHERS,
            *_tokens(batch),
            arrays.texts([write.status for write in writes]),
            arrays.numbers(write.hold for write in writes),
            arrays.numbers(write.ended for write in writes),
            arrays.blobs(None if run is None else run.body for run in held),
            arrays.texts([None if run is None else run_info(run) for run in held]),
            arrays.numbers(None if run is None else crc(run.body) for run in held),
            arrays.numbers(write.wait_us for write in writes),
            arrays.numbers(write.duration_ms for write in writes),
            arrays.numbers(write.failures for write in writes),
            arrays.texts([write.error for write in writes]),
            arrays.texts([write.history for write in writes]),
            arrays.texts([write.parked_kind for write in writes]),
            arrays.numbers(write.given_back for write in writes),
            arrays.numbers(write.crashed for write in writes),
            arrays.numbers(write.leave_lane for write in writes),
        )
        return _who_holds(rows)

    async def tokens(self, runs: Sequence[Run]) -> Mapping[Identity, tuple[int | None, int, str]]:
        found = arrays.columns([identity_of(run) for run in runs])
        rows = await self._tx.rows(_WHY_NOT, *found)
        return {(row[0], row[1], row[2]): (row[3], row[4], row[5]) for row in rows}


def _ready(row: Row) -> Ready:
    """A row of CLAIM_READY. Where it is now, nobody knows: its claim has just moved it."""
    expires_us = None if row[7] is None else to_us(row[7])
    return Ready._make((*row[:7], expires_us, *row[8:13], 0))


def _claim_values(tasks: Sequence[Task], order: Sequence[int]) -> tuple[str, ...]:
    """The arrays of CLAIM, in this order. The ids are given out in the order of arrival."""
    ids = list(uuid7_block(len(tasks)))
    found = [tasks[n] for n in order]
    messages = [each.message for each in found]
    return (
        arrays.ids(ids[n] for n in order),
        arrays.texts([m.tenant_id for m in messages]),
        arrays.texts([m.id for m in messages]),
        arrays.texts([m.type for m in messages]),
        arrays.numbers(int(m.priority) for m in messages),
        arrays.texts([each.key for each in found]),
        arrays.numbers(each.created_us for each in found),
        arrays.numbers(each.expires_us for each in found),
        arrays.texts([m.correlation_id for m in messages]),
        arrays.texts([None if m.trace is None else m.trace_id for m in messages]),
        arrays.blobs(each.candidate.sha256 for each in found),
    )


def _bodies(tasks: Sequence[Task], order: Sequence[int]) -> tuple[str, ...]:
    """The arrays of the whole messages: bodies, their forms and checksums."""
    deliveries = [tasks[n].candidate.delivery for n in order]
    return (
        arrays.blobs(each.body for each in deliveries),
        arrays.texts([tasks[n].form for n in order]),
        arrays.numbers(crc(each.body) if each.crc is None else each.crc for each in deliveries),
    )


def _claimed(item: Finished) -> Claimed:
    run = item.run
    message, token = run.message, run.token
    return message.tenant_id, run.subscription, message.id, token.worker_id, token.epoch


def _tokens(batch: Sequence[Finished]) -> tuple[str, ...]:
    return (
        *arrays.columns([identity_of(item.run) for item in batch]),
        arrays.numbers(item.run.token.worker_id for item in batch),
        arrays.numbers(item.run.token.epoch for item in batch),
    )


def _done_values(batch: Sequence[Finished]) -> tuple[str, ...]:
    return (
        *_tokens(batch),
        arrays.blobs(item.result for item in batch),
        arrays.numbers(duration_ms(item) for item in batch),
        arrays.ids(run_uuid(item.agent_run_id) for item in batch),
        arrays.numbers(item.run.failures for item in batch),
    )


def _who_holds(rows: Sequence[tuple[Any, ...]]) -> dict[Claimed, str]:
    """By the claim of each row that was written: `broker` or `store`."""
    return {row[:5]: row[5] for row in rows}
