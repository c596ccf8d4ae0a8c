"""What an outcome means for a message, its events and its next attempt, in every dialect."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ackbone.core import events
from ackbone.core.ids import derived_id
from ackbone.core.notices import End
from ackbone.core.outcome import RECORD_WORDS, Dead, Released, Retry, Status
from ackbone.core.store import Commit, Finished, Run
from ackbone.core.text import storable


def final_data(
    queue: str,
    tenant_id: str,
    message_id: str,
    event_name: str | None,
    trace_id: str | None,
    status: Status,
) -> dict[str, Any]:
    """What every final event's data holds."""
    return {
        "trace_id": trace_id or f"queue-{message_id}",
        "message_id": message_id,
        "queue": queue,
        "event_name": event_name,
        "tenant_id": tenant_id,
        "status": RECORD_WORDS[status],
        "duration_ms": 0,
        "agent_run_id": None,
    }


TRACEBACKS = 3
"""Failed attempts of one message whose tracebacks are kept: the last ones."""


def history_after(item: Finished, error: str, now_us: int) -> list[dict[str, Any]]:
    """The failed attempts of a message, with this one."""
    run = item.run
    failed: dict[str, Any] = {"attempt": run.attempt, "at": now_us, "error": storable(error)}
    if isinstance(item.outcome, Retry) and item.outcome.crashed:  # the handler's child process did
        failed.update(crash=True, alone=True)
    if item.traceback:
        failed["traceback"] = storable(item.traceback)
    earlier = [dict(each) for each in run.history]
    for each in earlier[: 1 - TRACEBACKS]:
        each.pop("traceback", None)
    return [*earlier, failed]


def runs_again(item: Finished) -> bool:
    """Will this message be tried again by itself? Not if a crash spent the last of its budget.

    Such a crash is one of a handler's own child process (`isolation="process"`). The message ran
    alone in it each time, and its worker lost nothing: the budget is what it has beyond the first.
    """
    outcome = item.outcome
    if isinstance(outcome, Retry):
        return not outcome.crashed or _alone_before(item.run) < item.crash_budget
    return isinstance(outcome, Released)


def _alone_before(run: Run) -> int:
    """Crashes of child processes that ran this message alone, before this one."""
    return sum(line.get("alone") is True for line in run.history)


def failures_after(item: Finished) -> int:
    """Failed attempts so far, this one included; a crash spends no retry."""
    outcome = item.outcome
    failed = isinstance(outcome, Dead) or (isinstance(outcome, Retry) and not outcome.crashed)
    return item.run.failures + int(failed)


def repeated(item: Finished, status: str) -> Commit:
    """The answer to a repeat, by the status of its row, which bears its token and runs no more."""
    fails = isinstance(item.outcome, Dead | Retry) and not runs_again(item)
    buried = status == Status.FAILED and not fails
    return Commit.BURIED if buried else Commit.ALREADY


def duration_ms(item: Finished) -> int:
    """How long the run took."""
    took_us = item.finished_at_us - item.started_at_us
    return took_us // 1000 if took_us > 0 else 0


def run_uuid(run_id: str | None) -> bytes | None:
    """The column is a UUID: another form is mapped to a UUIDv5 and stands as it is in the event."""
    if run_id is None:
        return None
    try:
        return uuid.UUID(run_id).bytes
    except ValueError:
        return uuid.UUID(derived_id("agent-run", run_id)).bytes


def bare(item: Finished, outcome: Dead) -> Finished:
    """The same end without anything that might be what the database refused."""
    return Finished(
        run=item.run,
        outcome=outcome,
        started_at_us=item.started_at_us,
        finished_at_us=item.finished_at_us,
    )


def final_entry(item: Finished, status: Status, extra: dict[str, Any]) -> events.Entry:
    """The final event of a run."""
    run = item.run
    message = run.message
    data: dict[str, Any] = {
        "trace_id": f"queue-{message.id}" if message.trace is None else message.trace_id,
        "message_id": message.id,
        "queue": run.queue,
        "event_name": message.type,
        "tenant_id": message.tenant_id,
        "status": RECORD_WORDS[status],
        "duration_ms": duration_ms(item),
        "agent_run_id": item.agent_run_id,
        "attempt": run.attempt,
    }
    if item.usage is not None:
        data["usage"] = msgspec.to_builtins(item.usage)
    if item.details:
        data.update(item.details)
    if extra:
        data.update(extra)
    return (
        message.tenant_id,
        run.subscription,
        message.id,
        events.EVENT_OF_STATUS[status],
        data,
    )


def recorded(end: End, *, is_created: bool) -> list[events.Entry]:
    """The events of a task that somebody else's worker ended.

    `is_created`: its `task.created` was written when it was submitted.
    """
    identity = (end.tenant_id, end.subscription, end.task_id)
    tool = end.tool_name or None
    data = final_data(end.subscription, end.tenant_id, end.task_id, tool, None, end.status)
    data.update(retry_count=end.retry_count, consumer=storable(end.consumer), foreign=True)
    if end.error:
        data["error"] = storable(end.error)
    if end.duplicate_of is not None:
        data["first_id"] = end.duplicate_of
    final: events.Entry = (*identity, events.EVENT_OF_STATUS[end.status], data)
    return [final] if is_created else [(*identity, events.CREATED, {"foreign": True}), final]
