"""Dead workers: what they were running goes back, with one crash more if the death counts.

What runs under a number that is not there any more is taken back, too, however it came to that: a
claim may be committed just after its worker was declared dead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ackbone.core import events
from ackbone.core.store import PARENT_WORKER, Reclaimed, Worker
from ackbone.store.crash import Crash, Gone, Judgement, judge, silent_children
from ackbone.store.letters import bury
from ackbone.store.unit import Change

from . import arrays
from .database import Tx
from .keys import free_keys
from .roll import FREE_SOURCES, LEFT, Sign
from .tasks import BEGUN, Identity
from .timebase import MOVED
from .wake import WORK

_PRESENT = "w.state IN ('alive', 'leaving')"
_OTHERS = f"FROM workers w WHERE {_PRESENT} AND w.worker_id <> $1::bigint ORDER BY w.worker_id"
LOOK = (
    f"SELECT clock_timestamp(), {MOVED}, pg_postmaster_start_time(),"
    f" ARRAY(SELECT w.worker_id {_OTHERS}), ARRAY(SELECT w.beat {_OTHERS}),"
    " EXISTS (SELECT 1 FROM queue_executions q WHERE q.status = 'running' AND NOT EXISTS"
    f" (SELECT 1 FROM workers w WHERE w.worker_id = q.worker_id AND {_PRESENT}))"
)
"""The server's clock, which server it is, the others' signs of life, and whether a message runs
under a number that is not there any more."""
_OUTLIVED = (
    "EXISTS (SELECT 1 FROM workers x WHERE x.state IN ('alive', 'leaving')"
    " AND x.worker_id <> w.worker_id AND x.machine = w.machine"
    " AND x.lease_until > w.lease_until + $4::float8 * interval '0.5 second'{})"
)
"""Workers of one machine that die together gave their last signs of life within a third of a lease:
only a worker whose last one is half a lease younger has outlived another one. While the server's
clock is set back, nobody seems to have outlived anybody, and deaths count for nobody."""
_GONE = (
    "SELECT w.worker_id, w.state, w.name, w.parent, EXISTS (SELECT 1 FROM workers p"
    f" WHERE p.state IN ('alive', 'leaving') AND w.parent = '{PARENT_WORKER}' || p.worker_id"
    f" AND p.worker_id <> ALL($2::bigint[])), {_OUTLIVED.format('')},"
    f" {_OUTLIVED.format(' AND x.parent = w.parent')}, "
    + _OUTLIVED.format(" AND x.started_at < w.lease_until - $4::float8 * interval '1 second'")
    + f" FROM workers w WHERE {_PRESENT} AND w.worker_id <> $1::bigint"
    " AND ((w.worker_id, w.beat) IN (SELECT * FROM unnest($2::bigint[], $3::bigint[]))"
    f" OR (w.parent = '{PARENT_WORKER}' || $1 AND w.name = ANY($5::text[])))"
    " ORDER BY w.worker_id FOR UPDATE OF w SKIP LOCKED"
)
_DECLARE = (
    "UPDATE workers SET"
    " state = CASE WHEN worker_id = ANY($2::bigint[]) THEN 'dead' ELSE 'left' END,"
    " ended_at = clock_timestamp() WHERE worker_id = ANY($1::bigint[])"
)
_FREE_SOURCES = "UPDATE sources SET worker_id = NULL WHERE worker_id = ANY($1::bigint[])"
_RUNNING = (
    "SELECT q.tenant_id, q.subscription, q.message_id, q.worker_id, w.state, q.queue_name,"
    " q.event_name, q.attempt, q.crashes, q.held, q.idem_key, q.lane, q.history::text, q.body,"
    " q.body_info::text, q.trace_id, w.name FROM queue_executions q LEFT JOIN workers w"
    " ON w.worker_id = q.worker_id WHERE q.status = 'running'"
    " AND coalesce(w.state, 'left') IN ('dead', 'left') {}"
    " ORDER BY q.tenant_id, q.subscription, q.message_id LIMIT 1000 FOR UPDATE OF q"
)
RUNNING_OF_THE_GONE = _RUNNING.format("")
_GIVE_BACK = (
    "UPDATE queue_executions q SET status = CASE q.held WHEN 'store' THEN 'ready' ELSE 'open' END,"
    " worker_id = NULL, epoch = q.epoch + 1, crashes = u.crashes, attempt = u.attempt,"
    f" due_at = {BEGUN}, history = coalesce(u.history, q.history::text)::json,"
    " lost_by = coalesce(u.lost_by, q.lost_by)"
    " FROM unnest($1::text[], $2::text[], $3::text[], $4::int[], $5::int[], $6::text[],"
    " $7::text[]) u(tenant, sub, message, crashes, attempt, history, lost_by)"
    " WHERE q.tenant_id = u.tenant"
    " AND q.subscription = u.sub AND q.message_id = u.message"
)
_QUARANTINE = (
    "UPDATE queue_executions SET status = 'failed', epoch = epoch + 1, crashes = $4::int,"
    " completed_at = clock_timestamp(), error_message = $5, history = $6::json, body = NULL"
    " WHERE tenant_id = $1 AND subscription = $2 AND message_id = $3"
)


class Running(NamedTuple):
    """A row that a worker ran which is gone."""

    tenant_id: str
    subscription: str
    message_id: str
    worker_id: int
    worker_state: str | None
    queue: str
    event_name: str | None
    attempt: int
    crashes: int
    held: str
    key: str | None
    lane: str | None
    history: str | None
    body: bytes | None
    body_info: str | None
    trace_id: str | None
    worker: str | None
    """Its name."""

    @property
    def identity(self) -> Identity:
        return self.tenant_id, self.subscription, self.message_id


async def reap(
    tx: Tx,
    change: Change,
    *,
    me: Worker,
    silent: Sequence[Sign],
    lease_s: float,
    crash_budget: int,
    ended: Mapping[str, int],
) -> Reclaimed:
    """Declare the silent workers dead and give back what they ran.

    A worker that has given a sign of life since it was looked at is not among them. `ended`: exit
    codes of children of this worker, by name, which are dead whatever signs they gave.
    """
    judged, children = await _declare(tx, me, silent, lease_s, ended)
    gone = [each.worker_id for each in judged]
    if gone:
        await tx.send(_FREE_SOURCES, arrays.numbers(gone))
    found = [Running(*row) for row in await tx.rows(RUNNING_OF_THE_GONE)]
    now_us = await tx.moment()
    crashed = [task for task in found if task.worker_state == "dead"]
    left = [task for task in found if task.worker_state != "dead"]
    quarantined = 0
    back: list[tuple[Running, int, int, str | None]] = []
    for task in crashed:
        worker = Worker(worker_id=task.worker_id, name=task.worker or "")
        crash = Crash(task, worker, crash_budget, now_us, ended=ended)
        change.entries.append(crash.lost(me))
        if crash.spent_the_budget:
            await _quarantine(tx, change, task, crash)
            quarantined += 1
        else:
            back.append((task, crash.crashes, task.attempt, crash.history))
    back += _handed_back(change, left)
    died = {each.worker_id for each in judged if each.state != "leaving"}
    await _give_back(tx, back, died)
    if back:
        change.topics.add(WORK)
    return Reclaimed(workers=gone, tasks=len(back), quarantined=quarantined, silent=children)


async def _declare(
    tx: Tx, me: Worker, silent: Sequence[Sign], lease_s: float, ended: Mapping[str, int]
) -> tuple[list[Gone], list[str]]:
    """Write down who is gone, and whether that counts; returns them, and the names of children of
    this worker that must be ended first."""
    rows = await tx.rows(
        _GONE,
        str(me.worker_id),
        arrays.numbers(sign.worker_id for sign in silent),
        arrays.numbers(sign.beat for sign in silent),
        str(lease_s),
        arrays.texts(list(ended)),
    )
    found = [Gone(*row) for row in rows]
    judged = {gone.worker_id: judge(gone, me, ended) for gone in found}
    gone = [each for each in found if judged[each.worker_id] is not Judgement.LEAVE]
    counted = [n for n, judgement in judged.items() if judgement is Judgement.COUNT]
    if gone:
        numbers = arrays.numbers(each.worker_id for each in gone)
        await tx.send(_DECLARE, numbers, arrays.numbers(counted))
    return gone, silent_children(found, me, ended)


async def leave(tx: Tx, change: Change, worker_id: int) -> None:
    """A worker stops in order. What it did not end, or never began, spends no attempt."""
    await tx.send(LEFT, str(worker_id))
    await tx.send(FREE_SOURCES, str(worker_id))
    rows = await tx.rows(_RUNNING.format("AND q.worker_id = $1::bigint"), str(worker_id))
    back = _handed_back(change, [Running(*row) for row in rows])
    await _give_back(tx, back, died=set())
    if back:
        change.topics.add(WORK)


def _handed_back(change: Change, left: list[Running]) -> list[tuple[Running, int, int, str | None]]:
    for task in left:
        data = {"attempt": task.attempt, "worker": task.worker_id}
        change.entries.append((*task.identity, events.RELEASED, data))
    return [(task, task.crashes, task.attempt - 1, None) for task in left]


async def _give_back(
    tx: Tx, back: list[tuple[Running, int, int, str | None]], died: Collection[int]
) -> None:
    """They run again, by whoever comes first. `died`: workers that did not stop in order."""
    if not back:
        return
    await tx.send(
        _GIVE_BACK,
        *(arrays.texts([task.identity[n] for task, *_ in back]) for n in range(3)),
        arrays.numbers(crashes for _, crashes, _, _ in back),
        arrays.numbers(attempt for _, _, attempt, _ in back),
        arrays.texts([history for *_, history in back]),
        arrays.texts([task.worker if task.worker_id in died else None for task, *_ in back]),
    )


async def _quarantine(tx: Tx, change: Change, task: Running, crash: Crash) -> None:
    """It killed too many workers: to the dead letters; its key and its conversation go on."""
    await tx.send(_QUARANTINE, *task.identity, str(crash.crashes), crash.error, crash.history)
    change.entries += [crash.failed(), bury(tx, crash.letter(), crash.now_us)]
    if task.key is not None:
        free_keys(tx, [((task.tenant_id, task.subscription, task.key), task.message_id)])
    change.let_go(task.tenant_id, task.subscription, task.key, task.lane)
