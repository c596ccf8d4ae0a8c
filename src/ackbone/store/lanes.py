"""Lanes: messages of one conversation run one after the other, in the order they were sent.

Only the head of a lane is `ready`, the rest is `queued`: finding work never walks over messages
that wait for their turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from ackbone.core.outcome import Status
from ackbone.core.store import Candidate

from .claiming import Claiming
from .tables import Pair, Placed
from .tasks import Task, new_task
from .unit import Lane


async def append(claim: Claiming, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Write messages with an ordering key behind their conversations, in order.

    Returns those that have a row already, have no key or cannot be read.
    """
    rest: list[Candidate] = []
    new: dict[Pair, Task] = {}
    for at, candidate in enumerate(candidates):
        message = candidate.message
        if (
            message is None
            or message.ordering_key is None
            or (message.tenant_id, message.id) in new
        ):
            rest.append(candidate)
        else:
            task = new_task(claim, at, candidate, message)
            new[message.tenant_id, message.id] = task
    if not new:
        return rest
    tasks = list(new.values())
    written = await claim.tx.tasks.append(claim, await _placed(claim, tasks))
    if len(written) < len(tasks):
        places = {task.at for task in written}
        rest += [task.candidate for task in tasks if task.at not in places]
    if rest or not claim.tx.exclusive:
        # A message that has a row already was counted as the head of its lane. And if others can
        # write meanwhile, the head may have ended: the later of the two looks after its commit.
        claim.change.lanes |= {_lane(claim, task) for task in written}
    return rest


async def _placed(claim: Claiming, tasks: Sequence[Task]) -> list[Placed]:
    """Give each task its number, and its status: only the first of a lane is ready."""
    take = claim.tx.sql.claims.take_places
    ((last,),) = await claim.tx.rows(take, claim.sub.name, len(tasks))
    wanted = {(task.message.tenant_id, task.message.ordering_key or "") for task in tasks}
    busy = await claim.tx.lanes.busy(claim.sub.name, wanted)
    placed = []
    for lane_seq, task in enumerate(tasks, int(last) - len(tasks) + 1):
        lane = (task.message.tenant_id, task.message.ordering_key or "")
        status = Status.QUEUED if lane in busy else Status.READY
        busy.add(lane)
        placed.append(Placed(task, status.value, lane_seq))
    return placed


def _lane(claim: Claiming, task: Task) -> Lane:
    return task.message.tenant_id, claim.sub.name, task.message.ordering_key or ""
