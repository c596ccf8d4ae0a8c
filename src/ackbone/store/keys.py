"""Idempotency keys: a key belongs to one message until that message has ended (P4).

A success keeps its result with the key for a window, and later messages with the key end as
duplicates. A message that ended otherwise gives its key back, and the oldest waiting one is next.

On PostgreSQL, `release_waiting` is a transaction of its own, after the commit that freed a key and
after the one that began to wait: the later one of the two sees the other. Inside `finish`, rows of
tasks would be locked after those of keys, against the order of the claim. On SQLite it is part of
the transaction.
"""

from __future__ import annotations

from collections.abc import Collection

from ackbone.core import events
from ackbone.core.outcome import Status

from .outcomes import final_data
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
        data = final_data(
            task.queue,
            task.tenant_id,
            task.message_id,
            task.event_name,
            task.trace_id,
            Status.DUPLICATE,
        )
        data["first_id"] = task.holder
        change.entries.append((*task.identity, events.DUPLICATE, data))
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
