"""Workers that leave or die, and what becomes of the messages that they were running.

A message of a dead worker goes back with one crash more if the death counts (`crash.judge` decides
that). A message of a worker that stopped in order goes back as if it had not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ackbone.core import events
from ackbone.core.store import Reclaimed, Worker

from .crash import Crash, Gone, Judgement, judge, silent_children
from .letters import bury
from .unit import WORK, Change, Identity, Tx


class Running(NamedTuple):
    """A task that runs under the id of a worker that is not there any more."""

    tenant_id: str
    subscription: str
    message_id: str
    worker_id: int
    worker_state: str | None
    worker_name: str | None
    queue: str
    event_name: str | None
    attempt: int
    crashes: int
    key: str | None
    lane: str | None
    history: str | None
    body: bytes | None
    body_info: str | None
    trace_id: str | None

    @property
    def identity(self) -> Identity:
        return self.tenant_id, self.subscription, self.message_id


async def leave(tx: Tx, change: Change, worker_id: int) -> None:
    """End a worker that stops in order. Runs that it did not end or begin cost no attempt."""
    sql, now_us = tx.sql.workers, await tx.moment()
    await tx.send(sql.end, worker_id, "left", now_us)
    await tx.send(sql.free_sources, worker_id)
    for task in [Running(*row) for row in await tx.rows(sql.running, worker_id)]:
        await _hand_back(tx, change, task, None, now_us)


async def reap(
    tx: Tx,
    change: Change,
    missing: Sequence[Gone],
    *,
    me: Worker,
    crash_budget: int,
    ended: Mapping[str, int],
) -> Reclaimed:
    """Declare the missing workers dead, and give back what they ran.

    Whatever runs under an id that is not there any more is given back, too: a claim may be
    committed just after its worker was declared dead. `ended`: exit codes of children of this
    worker, by name.
    """
    judged = {gone: judge(gone, me, ended) for gone in missing}
    gone = [each for each in missing if judged[each] is not Judgement.LEAVE]
    sql, now_us = tx.sql.workers, await tx.moment()
    for each in gone:
        state = "dead" if judged[each] is Judgement.COUNT else "left"
        await tx.send(sql.end, each.worker_id, state, now_us)
        await tx.send(sql.free_sources, each.worker_id)
    died = {each.worker_id for each in gone if each.state != "leaving"}
    found = [Running(*row) for row in await tx.rows(sql.running_of_the_gone)]
    quarantined = 0
    for task in found:
        lost_by = task.worker_name if task.worker_id in died else None
        if task.worker_state != "dead":
            await _hand_back(tx, change, task, lost_by, now_us)
            continue
        worker = Worker(worker_id=task.worker_id, name=task.worker_name or "")
        crash = Crash(task, worker, crash_budget, now_us, ended=ended)
        change.entries.append(crash.lost(me))
        if crash.spent_the_budget:
            await _quarantine(tx, change, task, crash)
            quarantined += 1
        else:
            values = (crash.crashes, task.attempt, crash.history, lost_by, now_us)
            await tx.send(sql.give_back, *task.identity, *values)
            change.topics.add(WORK)
    return Reclaimed(
        workers=[each.worker_id for each in gone],
        tasks=len(found) - quarantined,
        quarantined=quarantined,
        silent=silent_children(missing, me, ended),
    )


async def _hand_back(
    tx: Tx, change: Change, task: Running, lost_by: str | None, now_us: int
) -> None:
    """Make a task ready as if it had not run. `lost_by`: the name of its worker, if that died."""
    values = (task.crashes, task.attempt - 1, None, lost_by, now_us)
    await tx.send(tx.sql.workers.give_back, *task.identity, *values)
    data = {"attempt": task.attempt, "worker": task.worker_id}
    change.entries.append((*task.identity, events.RELEASED, data))
    change.topics.add(WORK)


async def _quarantine(tx: Tx, change: Change, task: Running, crash: Crash) -> None:
    """End a message that killed too many workers as a dead letter."""
    values = (crash.crashes, crash.error, crash.history, crash.now_us)
    await tx.send(tx.sql.workers.quarantine, *task.identity, *values)
    change.entries += [crash.failed(), bury(tx, crash.letter(), crash.now_us)]
    if task.key is not None:
        key = (task.tenant_id, task.subscription, task.key)
        tx.before_end(tx.sql.operations.free_key, *key, task.message_id)
    change.let_go(task.tenant_id, task.subscription, task.key, task.lane)
