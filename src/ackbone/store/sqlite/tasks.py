"""Rows of queue_executions: written from a candidate, read back as a run."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ackbone.core.broker import Subscription
from ackbone.core.clock import to_us
from ackbone.core.message import Message
from ackbone.core.outcome import Status
from ackbone.core.store import Candidate, Run, Token
from ackbone.store.fleet import Choice
from ackbone.store.stored import (
    body_info,
    crc,
    decode_history,
    expires_us,
    idem_key,
    stored_message,
)

from .claiming import Claiming

INSERT = (
    "INSERT OR IGNORE INTO queue_executions (subscription, queue_name, held, started_at, status,"
    " worker_id, epoch, attempt, due_at, lane, lane_seq, rowid, id, tenant_id, message_id,"
    " event_name, priority, idem_key, created_at, expires_at, correlation_id, trace_id, body,"
    " body_info, body_crc, body_sha256)"
)
ALIKE = (2, 4, 5, 12)
"""Tenant, type, priority and form of the body: places in `columns`."""
RUN_COLUMNS = (
    "rowid, tenant_id, message_id, epoch, attempt, crashes, lane, idem_key, expires_at, history,"
    " body, body_info, body_crc, lost_by"
)


class Task(msgspec.Struct):
    """A message that gets a row, and what the row says of it."""

    candidate: Candidate
    message: Message
    rowid: int
    form: str
    """How the stored body is read again; empty where the broker keeps it."""
    key: str | None
    created_us: int
    expires_us: int | None


class Existing(NamedTuple):
    """A row that was there before."""

    rowid: int
    status: str
    held: str
    sha256: bytes | None
    """None: it ended before a copy of it came."""
    event_name: str | None
    epoch: int
    attempt: int
    crashes: int
    history: str | None
    lost_by: str | None
    """The worker that was running it when it died."""


def claimed(claim: Claiming) -> tuple[Any, ...]:
    """First values for `INSERT`: rows that are run at once by this worker."""
    return (*_common(claim), Status.RUNNING, claim.worker_id, 1, 1, None, None, None)


def waiting(claim: Claiming, status: Status, lane: str, lane_seq: int) -> tuple[Any, ...]:
    """First values for `INSERT`: a row that has its place in a lane."""
    return (*_common(claim), status, None, 0, 0, claim.now_us, lane, lane_seq)


def _common(claim: Claiming) -> tuple[Any, ...]:
    return claim.sub.name, claim.sub.queue, claim.held, claim.now_us


def task(claim: Claiming, candidate: Candidate, message: Message, rowid: int) -> Task:
    key, expires = message.idempotency_key, candidate.delivery.expires_at_us
    if key is not None or claim.sub.dedup_by_id:  # most have none, and a call is a call
        key = idem_key(claim.sub, message)
    if expires is not None or message.expires_at is not None:
        expires = expires_us(candidate.delivery, message, claim.ahead)
    form = body_info(candidate) if claim.held == "store" else ""
    return Task(candidate, message, rowid, form, key, to_us(message.created_at), expires)


def columns(
    claim: Claiming, tasks: Sequence[Task], row_ids: Sequence[bytes]
) -> tuple[Sequence[Any], ...]:
    """Values for `INSERT`. The body and its form stay only where the store holds the message."""
    messages = [task.message for task in tasks]
    bodies: Sequence[bytes | None]
    forms: Sequence[str | None]
    checks: Sequence[int | None]
    bodies = forms = checks = (None,) * len(tasks)
    if claim.held == "store":
        deliveries = [task.candidate.delivery for task in tasks]
        bodies = [delivery.body for delivery in deliveries]
        forms = [task.form for task in tasks]
        checks = [crc(d.body) if d.crc is None else d.crc for d in deliveries]
    return (
        [task.rowid for task in tasks],
        row_ids,
        [message.tenant_id for message in messages],
        [message.id for message in messages],
        [message.type for message in messages],
        [message.priority for message in messages],
        [task.key for task in tasks],
        [task.created_us for task in tasks],
        [task.expires_us for task in tasks],
        [message.correlation_id for message in messages],
        [None if message.trace is None else message.trace_id for message in messages],
        bodies,
        forms,
        checks,
        [task.candidate.sha256 for task in tasks],
    )


def chosen(mark: int) -> dict[str, str]:
    """By the rule of a `Choice`, the condition that follows it, with its types at this mark."""
    types = f"(SELECT value FROM json_each(?{mark}))"
    return {
        "all": "",
        "only": f" AND event_name IN {types}",
        "but": f" AND event_name NOT IN {types}",
    }


def chosen_value(choice: Choice) -> tuple[str, ...]:
    """The value for `chosen`, if its rule has one."""
    return () if choice.rule == "all" else (msgspec.json.encode(choice.types).decode(),)


def max_rowid(conn: sqlite3.Connection) -> int:
    found: int | None = conn.execute("SELECT max(rowid) FROM queue_executions").fetchone()[0]
    return found or 0


def find(conn: sqlite3.Connection, sub: Subscription, message: Message) -> Existing | None:
    """The row of a message, by its identity."""
    found = conn.execute(
        "SELECT rowid, status, held, body_sha256, event_name, epoch, attempt, crashes, history,"
        " lost_by"
        " FROM queue_executions WHERE tenant_id = ? AND subscription = ? AND message_id = ?",
        (message.tenant_id, sub.name, message.id),
    ).fetchone()
    return None if found is None else Existing(*found)


def hold(conn: sqlite3.Connection, rowid: int, candidate: Candidate) -> None:
    """Adopt: the row takes the whole message, so that its broker copy may go."""
    body = candidate.delivery.body
    conn.execute(
        "UPDATE queue_executions SET held = 'store', body = ?, body_info = ?, body_crc = ?"
        " WHERE rowid = ? AND held = 'broker'",
        (body, body_info(candidate), crc(body), rowid),
    )


def new_run(claim: Claiming, task: Task, token: Token) -> Run:
    """The run of a message that was claimed for the first time."""
    delivery = task.candidate.delivery
    return Run(
        subscription=claim.sub.name,
        queue=claim.sub.queue,
        idem_key=task.key,
        message=task.message,
        token=token,
        attempt=1,
        crashes=0,
        claimed_at_us=claim.now_us,
        created_at_us=task.created_us,
        row=task.rowid,
        delivery=delivery if claim.held == "broker" else None,
        body=delivery.body,
        body_info=task.form,
        codec=task.candidate.codec,
    )


def run_of_row(claim: Claiming, found: Sequence[Any]) -> Run:
    """A claimed row (RUN_COLUMNS) as a run. Raises StoreCorrupt or DecodeError."""
    rowid, _, message_id, epoch, attempt, crashes, lane, key, _, history = found[:10]
    body, info, check = found[10:13]
    message = stored_message(claim.sub, message_id, body, info, check)
    return Run(
        subscription=claim.sub.name,
        queue=claim.sub.queue,
        idem_key=key,
        lane=lane,
        message=msgspec.structs.replace(message, attempt=attempt),
        token=Token(claim.worker_id, epoch),
        attempt=attempt,
        crashes=crashes,
        claimed_at_us=claim.now_us,
        created_at_us=to_us(message.created_at),
        row=rowid,
        history=decode_history(history),
        body=body,
        body_info=info,
    )
