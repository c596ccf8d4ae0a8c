"""Lanes: messages of one conversation run one after the other, in the order they were sent.

Only the head of a lane is `ready`, the rest is `queued`. The one fetcher of a source holds its row
while it writes a batch, so that numbers are given out and seen in one order. Whoever ended a head
or wrote behind one looks, after its commit, whether the next is to be ready: the later of two that
meet sees what the other did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ackbone.core.broker import Subscription
from ackbone.core.ids import uuid7_block
from ackbone.core.outcome import Status
from ackbone.core.store import Candidate
from ackbone.store.stored import ENDED, UNENDED, Ahead, body_info, crc, none_of

from . import arrays, tasks
from .arrays import moment
from .database import Tx

Lane = tuple[str, str, str]
"""tenant_id, subscription, lane"""

_ALIVE = "SELECT state FROM workers WHERE worker_id = $1::bigint FOR SHARE"
OWNER = (
    "SELECT s.worker_id FROM sources s JOIN workers w ON w.worker_id = s.worker_id"
    " WHERE s.subscription = $1 AND s.part = '' AND w.state = 'alive'"
)
_OWN = (
    "INSERT INTO sources (subscription, worker_id) VALUES ($1, $2::bigint)"
    " ON CONFLICT (subscription, part) DO UPDATE SET worker_id = excluded.worker_id"
    " WHERE sources.worker_id = excluded.worker_id OR sources.worker_id IS NULL"
    " OR sources.worker_id NOT IN (SELECT worker_id FROM workers WHERE state = 'alive')"
    " RETURNING 1"
)
_NUMBERS = "UPDATE sources SET n = n + $2::bigint WHERE subscription = $1 AND part = '' RETURNING n"
_BUSY = (
    "SELECT u.tenant, u.lane FROM unnest($2::text[], $3::text[]) u(tenant, lane)"
    " WHERE EXISTS (SELECT 1 FROM queue_executions q WHERE q.tenant_id = u.tenant"
    " AND q.subscription = $1 AND q.lane = u.lane AND q.lane IS NOT NULL"
    f" AND {none_of(*ENDED, column='q.status')})"
)
_APPEND = (
    "INSERT INTO queue_executions (subscription, queue_name, held, started_at, due_at, id,"
    " tenant_id, message_id, event_name, priority, idem_key, created_at, expires_at,"
    " correlation_id, trace_id, body_sha256, status, lane, lane_seq, body, body_info, body_crc)"
    f" SELECT $1, $2, 'store', clock_timestamp(), {tasks.BEGUN}, u.id, u.tenant, u.message,"
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
_ADVANCE = (
    f"UPDATE queue_executions q SET status = 'ready', due_at = {tasks.BEGUN}"
    " FROM unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, lane)"
    " CROSS JOIN LATERAL (SELECT f.message_id, f.status FROM queue_executions f"
    " WHERE f.tenant_id = u.tenant AND f.subscription = u.sub AND f.lane = u.lane"
    f" AND f.lane IS NOT NULL AND {none_of(*ENDED, column='f.status')}"
    " ORDER BY f.lane_seq LIMIT 1) h"
    " WHERE h.status = 'queued' AND q.tenant_id = u.tenant AND q.subscription = u.sub"
    " AND q.message_id = h.message_id AND q.status = 'queued' RETURNING 1"
)
_NEXT_LANE = (
    "SELECT {0}tenant_id, {0}subscription, {0}lane FROM queue_executions {1}"
    " WHERE {0}lane IS NOT NULL AND {2}{3} ORDER BY {0}tenant_id, {0}subscription, {0}lane LIMIT 1"
)
STUCK = (
    # From lane to lane through the index, whatever waits in each.
    "WITH RECURSIVE lanes (tenant_id, subscription, lane) AS ("
    f"({_NEXT_LANE.format('', '', UNENDED, '')}) UNION ALL SELECT n.* FROM lanes l"
    " CROSS JOIN LATERAL ("
    + _NEXT_LANE.format(
        "m.",
        "m",
        none_of(*ENDED, column="m.status"),
        " AND (m.tenant_id, m.subscription, m.lane) > (l.tenant_id, l.subscription, l.lane)",
    )
    + ") n) SELECT l.tenant_id, l.subscription, l.lane FROM lanes l CROSS JOIN LATERAL ("
    "SELECT f.status FROM queue_executions f WHERE f.tenant_id = l.tenant_id"
    " AND f.subscription = l.subscription AND f.lane = l.lane AND f.lane IS NOT NULL"
    f" AND {none_of(*ENDED, column='f.status')} ORDER BY f.lane_seq LIMIT 1) h"
    " WHERE h.status = 'queued'"
)
"""Lanes whose first message only waits: a net."""


async def own_source(tx: Tx, subscription: str, worker_id: int) -> bool:
    """Become or stay the one fetcher of an ordered source; False: a living worker has it.

    The worker's own row is held until the end: a reaper must not give the source to another while
    a batch of the old fetcher is under way.
    """
    state = await tx.rows(_ALIVE, str(worker_id))
    if state != [("alive",)]:
        return False
    return bool(await tx.rows(_OWN, subscription, str(worker_id)))


async def append(
    tx: Tx, sub: Subscription, candidates: Sequence[Candidate], ahead: Ahead
) -> tuple[list[Candidate], set[Lane]]:
    """Write keyed messages behind their conversations, in order.

    Returns those that are known before or cannot be read, and the lanes that were written to.
    """
    keyed = [c for c in candidates if c.message is not None and c.message.ordering_key is not None]
    rest = [c for c in candidates if c.message is None or c.message.ordering_key is None]
    new: dict[tuple[str, str], tasks.Task] = {}
    for candidate, row_id in zip(keyed, uuid7_block(len(keyed)), strict=True):
        message = candidate.message
        assert message is not None  # noqa: S101 - asked for above
        if (message.tenant_id, message.id) in new:
            rest.append(candidate)
        else:
            task = tasks.task(sub, candidate, message, row_id, ahead)
            new[task.identity] = task
    if not new:
        return rest, set()
    found = {(t, m) for t, m in await _insert(tx, sub, list(new.values()))}
    rest += [task.candidate for identity, task in new.items() if identity not in found]
    written = {
        (task.message.tenant_id, sub.name, task.message.ordering_key or "")
        for identity, task in new.items()
        if identity in found
    }
    return rest, written


async def _insert(tx: Tx, sub: Subscription, new: Sequence[tasks.Task]) -> list[tuple[str, str]]:
    ((last,),) = await tx.rows(_NUMBERS, sub.name, str(len(new)))
    wanted = sorted({(t.message.tenant_id, t.message.ordering_key or "") for t in new})
    busy = {
        (tenant, lane)
        for tenant, lane in await tx.rows(
            _BUSY,
            sub.name,
            arrays.texts([tenant for tenant, _ in wanted]),
            arrays.texts([lane for _, lane in wanted]),
        )
    }
    placed: list[tuple[tasks.Task, str, str, int]] = []
    for lane_seq, task in enumerate(new, int(last) - len(new) + 1):
        lane = (task.message.tenant_id, task.message.ordering_key or "")
        # One that turns out to be known was counted as the head: the look after the commit mends.
        status = Status.QUEUED if lane in busy else Status.READY
        busy.add(lane)
        placed.append((task, status, lane[1], lane_seq))
    placed.sort(key=lambda each: each[0].identity)
    bodies = [task.candidate.delivery.body for task, *_ in placed]
    return [
        (tenant, message)
        for tenant, message in await tx.rows(
            _APPEND,
            sub.name,
            sub.queue,
            *tasks.claim_values([task for task, *_ in placed]),
            arrays.texts([status for _, status, _, _ in placed]),
            arrays.texts([lane for _, _, lane, _ in placed]),
            arrays.numbers(lane_seq for *_, lane_seq in placed),
            arrays.blobs(bodies),
            arrays.texts([body_info(task.candidate) for task, *_ in placed]),
            arrays.numbers(crc(body) for body in bodies),
        )
    ]


async def advance(tx: Tx, lanes: Iterable[Lane]) -> int:
    """The first message of each conversation becomes ready, if it only waited for its turn."""
    found = sorted(set(lanes))
    if not found:
        return 0
    columns = [arrays.texts([lane[n] for lane in found]) for n in range(3)]
    return len(await tx.rows(_ADVANCE, *columns))
