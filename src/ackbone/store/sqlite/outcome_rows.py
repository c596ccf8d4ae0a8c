"""What an outcome writes into the row of its task: assignments, their values, the new status."""

from __future__ import annotations

from typing import Any

import msgspec

from ackbone.core.outcome import (
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
from ackbone.core.store import Finished, Run
from ackbone.core.text import storable
from ackbone.store.outcomes import (
    duration_ms,
    failures_after,
    history_after,
    run_uuid,
    runs_again,
)
from ackbone.store.stored import crc, run_info

Write = tuple[str, tuple[Any, ...], Status]
"""`name = ?, …` of an UPDATE, the values for its marks, and what the task is then."""

_encode = msgspec.json.Encoder().encode
_HOLD = (
    "held = 'store', body = coalesce(body, ?), body_info = coalesce(body_info, ?),"
    " body_crc = coalesce(body_crc, ?)"
)


def write_of(item: Finished, now_us: int) -> Write:  # noqa: PLR0911 - one per outcome
    match item.outcome:
        case Done():
            return _done(item, now_us)
        case Retry() as retry:
            return _retry(retry, item, now_us)
        case Park() as park:
            return _park(park, item)
        case Released(after_s):
            return _released(after_s, item, now_us)
        case Dead(reason, error):
            return _ended(Status.FAILED, error or reason, item, now_us)
        case Expired():
            return _ended(Status.EXPIRED, "expired before it could run", item, now_us)
        case Rejected(reason):
            return _ended(Status.REJECTED, reason, item, now_us)
        case Discarded(reason):
            return _ended(Status.DISCARDED, reason, item, now_us)
        case Duplicate(of):
            return _ended(Status.DUPLICATE, f"duplicate of {of}", item, now_us)


def all_done_statement(values: str) -> str:
    """Many plain successes at once; see `all_done_values`."""
    return (
        "UPDATE queue_executions SET status = 'succeeded', result = u.column1, completed_at = ?1,"
        " duration_ms = u.column2, agent_run_id = u.column3, retry_count = u.column4, body = NULL,"
        " body_info = NULL, due_at = NULL"
        f" FROM (VALUES {values}) u WHERE queue_executions.rowid = u.column8"
        " AND worker_id = u.column5 AND epoch = u.column6 AND message_id = u.column7"
        " AND held = u.column9 AND status = 'running'"
    )


ALL_DONE_ALIKE = (3, 4, 5, 8)
"""Earlier failures, worker, epoch and holder: places in `all_done_values`."""


def all_done_values(item: Finished) -> tuple[Any, ...]:
    """One row of `all_done_statement`; its `?1` is the time of now."""
    run = item.run
    token, run_id = run.token, item.agent_run_id
    return (
        item.result,
        duration_ms(item),
        None if run_id is None else run_uuid(run_id),
        0 if run.attempt == 1 else run.failures,
        token.worker_id,
        token.epoch,
        run.message.id,
        run.row,
        "store" if run.delivery is None else "broker",
    )


def _done(item: Finished, now_us: int) -> Write:
    assignments = (
        "status = 'succeeded', result = ?, completed_at = ?, duration_ms = ?, agent_run_id = ?,"
        " retry_count = ?, body = NULL, body_info = NULL, due_at = NULL"
    )
    run_id = run_uuid(item.agent_run_id)
    values = (item.result, now_us, duration_ms(item), run_id, item.run.failures)
    return assignments, values, Status.SUCCEEDED


def _retry(retry: Retry, item: Finished, now_us: int) -> Write:
    run, reason = item.run, storable(retry.reason)
    history = _encode(history_after(item, retry.reason, now_us)).decode()
    if not runs_again(item):
        assignments = (
            "status = 'failed', completed_at = ?, crashes = crashes + 1, error_message = ?,"
            " body = NULL, history = ?"
        )
        return assignments, (now_us, reason, history), Status.FAILED
    assignments = (
        "status = 'ready', due_at = ?, crashes = crashes + ?, error_message = ?, retry_count = ?,"
        f" history = ?, {_HOLD}"
    )
    due_us = now_us + int(retry.after_s * 1e6)
    failures = failures_after(item)
    values = (due_us, int(retry.crashed), reason, failures, history, *_held(run))
    return assignments, values, Status.READY


def _park(park: Park, item: Finished) -> Write:
    """Set aside is not failed: the attempt is given back."""
    leave = ", lane = NULL" if item.on_parked == "skip" else ""
    assignments = (
        "status = 'parked', attempt = attempt - 1, parked_kind = ?, error_message = ?,"
        f" {_HOLD}{leave}"
    )
    return assignments, (park.kind, storable(park.reason), *_held(item.run)), Status.PARKED


def _released(after_s: float, item: Finished, now_us: int) -> Write:
    """With a wait the store keeps it: a broker would bring it back at once."""
    if after_s > 0:
        assignments = f"status = 'ready', due_at = ?, attempt = attempt - 1, {_HOLD}"
        return assignments, (now_us + int(after_s * 1e6), *_held(item.run)), Status.READY
    assignments = (
        "status = CASE held WHEN 'store' THEN 'ready' ELSE 'open' END, due_at = ?,"
        " attempt = attempt - 1"
    )
    return assignments, (now_us,), Status.READY


def _ended(status: Status, why: str, item: Finished, now_us: int) -> Write:
    return (
        "status = ?, completed_at = ?, duration_ms = ?, retry_count = ?, error_message = ?,"
        " body = NULL",
        (status.value, now_us, duration_ms(item), failures_after(item), storable(why)),
        status,
    )


def _held(run: Run) -> tuple[Any, ...]:
    return run.body, run_info(run), crc(run.body)
