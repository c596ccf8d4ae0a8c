"""Claims of tasks: the event `task.created`, and failures that other programs' workers counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ackbone.core import events
from ackbone.core.broker import Subscription
from ackbone.core.codecs.task import CREATED_MARK
from ackbone.core.events import Entry
from ackbone.core.message import Message
from ackbone.core.store import Run
from ackbone.core.task_protocol import TaskProtocol

from .claiming import Claiming
from .outcomes import identity_of


def created(sub: Subscription, made: Iterable[tuple[Message, int]]) -> list[Entry]:
    """Return `task.created` for tasks that have none yet, each with its `created_at` in µs.

    The task protocol asks for this event for every task. `Orchestrator.submit` writes it; for tasks
    that another program sent, the claim does. On other queues `task.claimed` says when a message
    was made: that saves a quarter of the rows.
    """
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


async def with_failures_elsewhere(
    claim: Claiming, protocol: TaskProtocol, runs: Sequence[Run]
) -> list[Run]:
    """Count the failures of tasks that workers of other programs tried before."""
    counted = []
    for run in runs:
        found = _failed_elsewhere(protocol, run)
        if found is not run:
            sql = claim.tx.sql.claims.count_failures
            await claim.tx.send(sql, *identity_of(run), found.attempt, found.failures)
        counted.append(found)
    return counted


def _failed_elsewhere(protocol: TaskProtocol, run: Run) -> Run:
    """Return the run with these failures counted, the same run if there are none."""
    if not run.message.metadata.get("retry_count"):
        return run
    failures = min(int(run.message.metadata["retry_count"]), protocol.max_retries)
    if failures <= run.failures:
        return run
    attempt = run.attempt + failures - run.failures
    message = msgspec.structs.replace(run.message, attempt=attempt)
    return msgspec.structs.replace(run, message=message, attempt=attempt)
