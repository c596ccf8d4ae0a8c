"""Outcomes: what each one means for the row of a message, its events, its next attempt and its dead
letter, which keeps what could not be processed whole, with its reason and history (P6)."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ackbone.core import events
from ackbone.core.events import Entry
from ackbone.core.ids import derived_id, uuid7_bytes
from ackbone.core.notices import End
from ackbone.core.outcome import (
    RECORD_WORDS,
    Dead,
    Discarded,
    Done,
    Duplicate,
    Expired,
    Park,
    Rejected,
    Released,
    Retry,
    Status,
)
from ackbone.core.store import Commit, Finished, Run
from ackbone.core.text import storable

from .tasks import run_info
from .unit import Change, Identity, Tx

_encode = msgspec.json.Encoder().encode
HANDED_BACK = "handed back"
"""Instead of a status: `ready` if the store holds the message, `open` if the broker does."""


class Write(NamedTuple):
    """What an outcome other than success writes into the row of its task. None: no change."""

    status: str
    hold: bool = False
    """The row takes the whole message, if it has not got it."""
    ended: bool = False
    """The task is final; its body goes."""
    wait_us: int | None = None
    """It is due this long after now."""
    duration_ms: int | None = None
    failures: int | None = None
    error: str | None = None
    history: str | None = None
    parked_kind: str | None = None
    given_back: int = 0
    """Attempts that this one did not use after all."""
    crashed: int = 0
    """Crashes that it adds."""
    leave_lane: bool = False
    """Its conversation goes on without it."""


def write_of(item: Finished, now_us: int) -> Write:  # noqa: PLR0911 - one per outcome
    """What the outcome of a run writes into its row. Successes are written by themselves."""
    match item.outcome:
        case Retry(after_s, reason, crashed):
            history = _encode(history_after(item, reason, now_us)).decode()
            error = storable(reason)
            if not runs_again(item):
                return Write("failed", ended=True, error=error, history=history, crashed=1)
            return Write(
                "ready",
                hold=True,
                wait_us=int(after_s * 1e6),
                failures=failures_after(item),
                error=error,
                history=history,
                crashed=int(crashed),
            )
        case Park(kind, reason):  # set aside is not failed: the attempt is given back
            return Write(
                "parked",
                hold=True,
                error=storable(reason),
                parked_kind=kind,
                given_back=1,
                leave_lane=item.on_parked == "skip",
            )
        case Released(after_s):  # with a wait the store keeps it: a broker would not wait
            waits = after_s > 0
            status = "ready" if waits else HANDED_BACK
            return Write(status, hold=waits, wait_us=int(after_s * 1e6), given_back=1)
        case Dead(reason, error):
            return _ended(Status.FAILED, error or reason, item)
        case Expired():
            return _ended(Status.EXPIRED, "expired before it could run", item)
        case Rejected(reason):
            return _ended(Status.REJECTED, reason, item)
        case Discarded(reason):
            return _ended(Status.DISCARDED, reason, item)
        case Duplicate(of):
            return _ended(Status.DUPLICATE, f"duplicate of {of}", item)
        case Done():
            raise AssertionError("successes are written by themselves")


def _ended(status: Status, why: str, item: Finished) -> Write:
    return Write(
        status.value,
        ended=True,
        duration_ms=duration_ms(item),
        failures=failures_after(item),
        error=storable(why),
    )


def identity_of(run: Run) -> tuple[str, str, str]:
    """tenant_id, subscription, message_id"""
    return run.message.tenant_id, run.subscription, run.message.id


def final_data(
    queue: str,
    tenant_id: str,
    message_id: str,
    event_name: str | None,
    trace_id: str | None,
    status: Status,
) -> dict[str, Any]:
    """The data that every final event holds."""
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


class TaskRow(msgspec.Struct):
    """A task, in the order of the first columns of statements that return tasks."""

    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    event_name: str | None
    trace_id: str | None

    @property
    def identity(self) -> Identity:
        return self.tenant_id, self.subscription, self.message_id

    def final(self, status: Status, **data: Any) -> Entry:
        """The final event of a task that ends otherwise than by its run."""
        found = final_data(
            self.queue, self.tenant_id, self.message_id, self.event_name, self.trace_id, status
        )
        found.update(data)
        return (*self.identity, events.EVENT_OF_STATUS[status], found)

    def letter(self, reason: str, error: str, **kept: Any) -> Letter:
        return Letter(*self.identity, self.queue, self.event_name, reason, error, **kept)

    def let_go(self, tx: Tx, change: Change, key: str | None, lane: str | None) -> None:
        """A task that ended holds neither its key nor its conversation."""
        if key is not None:
            held = (self.tenant_id, self.subscription, key, self.message_id)
            tx.before_end(tx.sql.operations.free_key, *held)
        change.let_go(self.tenant_id, self.subscription, key, lane)


def task_of(run: Run) -> TaskRow:
    message = run.message
    return TaskRow(*identity_of(run), run.queue, message.type, message.trace_id)


TRACEBACKS = 3
"""How many failed attempts of one message keep their tracebacks: the latest ones."""


def history_after(item: Finished, error: str, now_us: int) -> list[dict[str, Any]]:
    """The failed attempts of a message, including this one."""
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
    """True if this message is tried again by itself, False if a crash spent its crash budget.

    Such a crash is one of a handler's own child process (`isolation="process"`). The message ran
    alone in it each time, and its worker lost nothing: the budget counts the crashes after the
    first one.
    """
    outcome = item.outcome
    if isinstance(outcome, Retry):
        return not outcome.crashed or _alone_before(item.run) < item.crash_budget
    return isinstance(outcome, Released)


def _alone_before(run: Run) -> int:
    """How many child processes crashed before that ran this message alone."""
    return sum(line.get("alone") is True for line in run.history)


def failures_after(item: Finished) -> int:
    """Failed attempts so far, including this one. A crash uses no retry."""
    outcome = item.outcome
    failed = isinstance(outcome, Dead) or (isinstance(outcome, Retry) and not outcome.crashed)
    return item.run.failures + int(failed)


def repeated(item: Finished, status: str) -> Commit:
    """The answer to a repeat whose token is on a row that does not run any more, by its status."""
    fails = isinstance(item.outcome, Dead | Retry) and not runs_again(item)
    buried = status == Status.FAILED and not fails
    return Commit.BURIED if buried else Commit.ALREADY


def duration_ms(item: Finished) -> int:
    """How long the run took, in milliseconds."""
    took_us = item.finished_at_us - item.started_at_us
    return took_us // 1000 if took_us > 0 else 0


def run_uuid(run_id: str | None) -> bytes | None:
    """The column is a UUID. Another form is mapped to a UUIDv5; the event has it as it is."""
    if run_id is None:
        return None
    try:
        return uuid.UUID(run_id).bytes
    except ValueError:
        return uuid.UUID(derived_id("agent-run", run_id)).bytes


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
    """The events of a task that a worker of another program ended.

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


class Letter(msgspec.Struct):
    """What is kept of a message that ended badly."""

    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    event_name: str | None
    reason: str
    error: str = ""
    retry_count: int = 0
    history: Sequence[Mapping[str, Any]] = ()
    body: bytes | None = None
    body_info: str | None = None


def letter_of(run: Run, reason: str, error: str) -> Letter:
    """The dead letter of a claimed message."""
    return task_of(run).letter(
        reason,
        error,
        retry_count=max(0, run.failures),
        history=run.history,
        body=run.body,
        body_info=run_info(run),
    )


def bury(tx: Tx, letter: Letter, now_us: int) -> Entry:
    """Write the dead letter with the commit; returns its ledger entry (`task.dlq`)."""
    letter_id = str(uuid.UUID(bytes=uuid7_bytes()))
    tx.letters[letter_id] = letter
    tx.at_end(
        tx.sql.operations.write_letter,
        letter_id,
        letter.tenant_id,
        letter.subscription,
        letter.message_id,
        letter.queue,
        letter.event_name,
        letter.reason,
        storable(letter.error),
        letter.retry_count,
        _encode(list(letter.history)).decode(),
        letter.body,
        letter.body_info,
        None if letter.body is None else zlib.crc32(letter.body),
        now_us,
    )
    data = {"dead_letter_id": letter_id, "reason": letter.reason, "queue": letter.queue}
    return letter.tenant_id, letter.subscription, letter.message_id, events.DLQ, data
