"""Messages that wait: for an idempotency key, or for their turn in a conversation.

A key belongs to one message until that message has ended (P4). A success keeps its result with the
key for a window, and later messages with the key end as duplicates. A message that ended otherwise
gives its key back, and the oldest waiting one is next.

Messages of one conversation (lane) run one after the other, in the order they were sent. Only the
head of a lane is `ready`, the rest is `queued`: finding work never walks over messages that wait
for their turn.

On PostgreSQL, `release_waiting` is a transaction of its own, after the commit that freed a key and
after the one that began to wait: the later one of the two sees the other. Inside `finish`, rows of
tasks would be locked after those of keys, against the order of the claim. On SQLite it is part of
the transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ackbone.core.outcome import Status
from ackbone.core.store import Candidate

from .claiming import Claiming
from .tables import Pair, Placed
from .tasks import Task, new_task
from .unit import WORK, Change, Identity, Key, Lane, Tx


async def release_waiting(
    tx: Tx, change: Change, keys: Collection[Key] | None, lanes: Collection[Lane]
) -> int:
    """Let messages go on that waited for these keys (None: for any key) or in these lanes.

    Returns how many ended as duplicates or are ready now.
    """
    ended: list[tuple[Identity, bytes | None]] = []
    following: dict[Key, Identity] = {}
    freed = set(lanes)
    for task in await tx.keys.waiting(keys) if keys is None or keys else ():
        if task.state is None:  # the key is free: the oldest is next, the others wait for it
            following.setdefault((task.tenant_id, task.subscription, task.key), task.identity)
            continue
        ended.append((task.identity, task.value))
        change.entries.append(task.final(Status.DUPLICATE, first_id=task.holder))
        if task.lane is not None:
            freed.add((task.tenant_id, task.subscription, task.lane))
    if ended:
        await tx.keys.end_as_duplicates(ended)
    if following:
        await tx.keys.make_ready(list(following.values()))
    moved = len(ended) + len(following)
    if freed:
        moved += await tx.lanes.advance(freed)
    if moved:
        change.topics.add(WORK)
    return moved


async def of_own_parts(
    claim: Claiming, candidates: Sequence[Candidate], opened: Collection[str]
) -> Sequence[Candidate]:
    """Make this worker the owner of the parts in `opened`. Return the candidates of parts that it
    owns.

    A copy that does not open its part is adopted only for the owner. Another worker that was given
    the part since then reads it from the first unsettled message, and might not have adopted the
    messages between. Taking a part over needs no lease: no message was left out before the copy
    that opens it, so adopting that copy, however late, passes over none.
    """
    parts = {c.delivery.part for c in candidates if c.delivery.part is not None}
    if not parts and not opened:
        return candidates
    tx, sql, sub, me = claim.tx, claim.tx.sql.claims, claim.sub.name, claim.worker.worker_id
    owners = await tx.rows(sql.owners, sub, sorted(parts.union(opened)))
    await tx.require_alive(me)
    owned = {part for part, owner in owners if owner == me}.union(opened)
    await tx.send(sql.take_parts, sub, me, sorted(owned), await tx.moment())
    return [c for c in candidates if c.delivery.part is None or c.delivery.part in owned]


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
