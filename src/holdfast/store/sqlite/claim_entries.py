"""What a claim tells the ledger: made, taken over, claimed, put off."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core import events
from holdfast.core.clock import to_us
from holdfast.core.message import Message
from holdfast.core.quota import WAITS_FOR
from holdfast.core.store import Candidate, Run

from . import tasks
from .claiming import Claiming
from .ledger import Entry
from .quotas import PutOff

TASK = "task"
"""The codec of the task protocol."""


def put_off(
    claim: Claiming, run: Run, wait: PutOff, candidate: Candidate | None, expires_us: int | None
) -> Entry:
    """A quota of its is used up: it waits for another window, and spends nothing."""
    if candidate is not None:
        tasks.hold(claim.conn, run.row, candidate)
    due = wait.until_us if expires_us is None else min(wait.until_us, expires_us)
    claim.conn.execute(
        "UPDATE queue_executions SET status = 'ready', due_at = ?, worker_id = NULL,"
        " attempt = attempt - 1, error_message = ? WHERE rowid = ?",
        (due, f"{WAITS_FOR}{wait.quota}", run.row),
    )
    data = {
        "attempt": run.attempt,
        "quota": wait.quota,
        "unit": wait.unit,
        "until": wait.until_us,
    }
    return run.message.tenant_id, run.subscription, run.message.id, events.RELEASED, data


def created(claim: Claiming, messages: Sequence[Message]) -> list[Entry]:
    """The task protocol asks for this event, whoever sent the task: here it is heard of first.

    Elsewhere `task.claimed` tells when a message was made, and one row less is a quarter of them.
    """
    if claim.sub.codec != TASK:
        return []
    return [
        (
            message.tenant_id,
            claim.sub.name,
            message.id,
            events.CREATED,
            {"created_at": to_us(message.created_at), "tool_name": message.type},
        )
        for message in messages
    ]


def reclaimed(claim: Claiming, message: Message, taken_from: str) -> Entry:
    """A stranger had it and let go of it: of what our own workers ran, the reaper tells."""
    data = {
        "original_consumer": taken_from,
        "new_consumer": claim.worker,
        "message_id": message.id,
    }
    return message.tenant_id, claim.sub.name, message.id, events.RECLAIMED, data


def claimed(run: Run) -> Entry:
    message = run.message
    data = {"attempt": run.attempt, "created_at": run.created_at_us}
    return message.tenant_id, run.subscription, message.id, events.CLAIMED, data
