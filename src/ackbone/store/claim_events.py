"""Events of the claim."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ackbone.core import events
from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.task import CREATED_MARK
from ackbone.core.events import Entry
from ackbone.core.message import Message
from ackbone.core.store import Run
from ackbone.store.quota_book import PutOff

TASK = "task"
"""The codec of the task protocol."""


def created(sub: Subscription, made: Iterable[tuple[Message, int]]) -> list[Entry]:
    """Return `task.created` for tasks that have none yet, each with its `created_at` in µs.

    The task protocol asks for this event for every task. `Orchestrator.submit` writes it; for tasks
    that another program sent, the claim does. On other queues `task.claimed` says when a message
    was made: that saves a quarter of the rows.
    """
    if sub.codec != TASK:
        return []
    return [
        task_created(message.tenant_id, sub.name, message.id, message.type, created_us)
        for message, created_us in made
        if not message.extra or message.extra.get(CREATED_MARK) != message.id
    ]


def task_created(
    tenant_id: str, subscription: str, task_id: str, tool_name: str, created_us: int
) -> Entry:
    data = {"created_at": created_us, "tool_name": tool_name}
    return tenant_id, subscription, task_id, events.CREATED, data


def failed_elsewhere(sub: Subscription, run: Run) -> Run:
    """Count the failures of a task that a worker of another program tried before.

    Returns the same run if there is nothing to count.
    """
    if sub.codec != TASK or not run.message.metadata.get("retry_count"):
        return run
    failures = min(int(run.message.metadata["retry_count"]), sub.max_retries)
    if failures <= run.failures:
        return run
    attempt = run.attempt + failures - run.failures
    message = msgspec.structs.replace(run.message, attempt=attempt)
    return msgspec.structs.replace(run, message=message, attempt=attempt)


def reclaimed(run: Run, worker: str, delivery: Delivery | None, lost_by: str | None) -> Entry:
    """The event of `worker` claiming a message that another consumer had and lost.

    That consumer is one of our workers that died (`lost_by`), or the one that held the broker's
    copy.
    """
    message = run.message
    taken_from = None if delivery is None else delivery.taken_from
    entry = None if delivery is None else delivery.entry
    data = {
        "original_consumer": taken_from or lost_by or "",
        "new_consumer": worker,
        "task_id": message.id,
        "message_id": entry or message.id,
    }
    return message.tenant_id, run.subscription, message.id, events.RECLAIMED, data


def claimed(run: Run) -> Entry:
    """The event of a run that was granted."""
    message = run.message
    data = {"attempt": run.attempt, "created_at": run.created_at_us}
    return message.tenant_id, run.subscription, message.id, events.CLAIMED, data


def waits_for_quota(run: Run, wait: PutOff) -> Entry:
    """The event of a message that is deferred because a quota is exhausted."""
    data = {
        "attempt": run.attempt,
        "quota": wait.quota,
        "unit": wait.unit,
        "until": wait.until_us,
    }
    return run.message.tenant_id, run.subscription, run.message.id, events.RELEASED, data
