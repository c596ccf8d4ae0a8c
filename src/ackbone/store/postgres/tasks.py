"""Rows of queue_executions: what a candidate becomes, and what a row is read back as."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from ackbone.core.broker import Subscription
from ackbone.core.clock import to_us
from ackbone.core.message import Message
from ackbone.core.store import Candidate, Run, Token
from ackbone.store.stored import (
    Ahead,
    body_info,
    crc,
    decode_history,
    expires_us,
    idem_key,
    stored_message,
)

from . import arrays
from .arrays import moment

Identity = tuple[str, str, str]
"""tenant_id, subscription, message_id"""
NOW = "(SELECT clock_timestamp())"
"""Once per statement: asked for each row, no index could be searched by it."""
BEGUN = "transaction_timestamp()"
"""For transactions that write when something is due, or act on what is over. Each is compared with
what this process knows of the clock as of its begin, and what it wrote moves if the clock is set
later: by `clock_timestamp()` it would move although it was written by the new clock.
"""
PK = "tenant_id = $1 AND subscription = $2 AND message_id = $3"
CLAIM = (
    # A copy of what is there changes nothing, but locks its row: what is said of it stays true.
    "INSERT INTO queue_executions AS t (subscription, queue_name, worker_id, status, held, epoch,"
    " attempt, started_at, id, tenant_id, message_id, event_name, priority, idem_key, created_at,"
    " expires_at, correlation_id, trace_id, body_sha256)"
    " SELECT $1, $2, $3::bigint, 'running', 'broker', 1, 1, clock_timestamp(), u.id, u.tenant,"
    f" u.message, u.type, u.priority, u.key, {moment('u.created')}, {moment('u.expires')},"
    " u.correlation, u.trace, u.sha"
    " FROM unnest($5::uuid[], $6::text[], $7::text[], $8::text[], $9::int[], $10::text[],"
    " $11::bigint[], $12::bigint[], $13::text[], $14::text[], $15::bytea[])"
    " u(id, tenant, message, type, priority, key, created, expires, correlation, trace, sha)"
    " ON CONFLICT (tenant_id, subscription, message_id) DO UPDATE SET status = 'running',"
    " worker_id = excluded.worker_id, epoch = t.epoch + 1, attempt = t.attempt + 1"
    " WHERE t.status = 'open' AND t.crashes < $4::int AND t.body_sha256 = excluded.body_sha256"
    " AND t.event_name = excluded.event_name"
    " RETURNING tenant_id, message_id, epoch, attempt, crashes, history::text, t.ctid, t.lost_by"
)
"""Sorted by identity; one row per identity."""
FIND = (
    "SELECT t.tenant_id, t.message_id, t.status, t.held, t.body_sha256, t.event_name,"
    " t.worker_id, t.epoch"
    " FROM unnest($2::text[], $3::text[]) u(tenant, message) JOIN queue_executions t"
    " ON t.tenant_id = u.tenant AND t.subscription = $1 AND t.message_id = u.message"
)
HOLD = (
    "UPDATE queue_executions SET held = 'store', body = $4::bytea, body_info = $5::json,"
    f" body_crc = $6::bigint WHERE {PK} AND held = 'broker'"
)
KEEP_SUSPECT = (
    f"UPDATE queue_executions SET status = 'ready', due_at = {BEGUN} WHERE {PK} AND status = 'open'"
)
RUN_COLUMNS = (
    "q.tenant_id, q.message_id, q.epoch, q.attempt, q.crashes, q.lane, q.idem_key, q.expires_at,"
    " q.history::text, q.body, q.body_info::text, q.body_crc, q.priority, q.due_at, q.lost_by"
)


class Task(msgspec.Struct):
    """A message that gets a row, and what the row says of it."""

    candidate: Candidate
    message: Message
    key: str | None
    created_us: int
    expires_us: int | None
    row_id: bytes

    @property
    def identity(self) -> tuple[str, str]:
        return self.message.tenant_id, self.message.id


class Existing(NamedTuple):
    """A row that was there before."""

    tenant_id: str
    message_id: str
    status: str
    held: str
    sha256: bytes | None
    """None: it ended before a copy of it came."""
    event_name: str | None
    worker_id: int | None
    epoch: int


class Ready(NamedTuple):
    """A row that was claimed from the store (RUN_COLUMNS)."""

    tenant_id: str
    message_id: str
    epoch: int
    attempt: int
    crashes: int
    lane: str | None
    key: str | None
    expires_at: datetime | None
    history: str | None
    body: bytes | None
    info: str | None
    check: int | None
    priority: int
    due_at: datetime
    lost_by: str | None
    """The worker that was running it when it died."""


def task(
    sub: Subscription, candidate: Candidate, message: Message, row_id: bytes, ahead: Ahead
) -> Task:
    return Task(
        candidate,
        message,
        idem_key(sub, message),
        to_us(message.created_at),
        expires_us(candidate.delivery, message, ahead),
        row_id,
    )


def claim_values(tasks: Sequence[Task]) -> tuple[str, ...]:
    """The arrays of CLAIM."""
    messages = [each.message for each in tasks]
    return (
        arrays.ids(each.row_id for each in tasks),
        arrays.texts([m.tenant_id for m in messages]),
        arrays.texts([m.id for m in messages]),
        arrays.texts([m.type for m in messages]),
        arrays.numbers(int(m.priority) for m in messages),
        arrays.texts([each.key for each in tasks]),
        arrays.numbers(each.created_us for each in tasks),
        arrays.numbers(each.expires_us for each in tasks),
        arrays.texts([m.correlation_id for m in messages]),
        arrays.texts([None if m.trace is None else m.trace_id for m in messages]),
        arrays.blobs(each.candidate.sha256 for each in tasks),
    )


def hold_values(sub: Subscription, candidate: Candidate, message: Message) -> tuple[Any, ...]:
    """The values of HOLD."""
    body = candidate.delivery.body
    return (
        message.tenant_id,
        sub.name,
        message.id,
        body,
        body_info(candidate),
        str(crc(body)),
    )


def claimed_run(
    sub: Subscription, task: Task, found: Sequence[Any], worker_id: int, now_us: int
) -> Run:
    """The run of a row that CLAIM returned."""
    _, _, epoch, attempt, crashes, history, ctid, _ = found
    message = task.message
    if attempt > 1:
        message = msgspec.structs.replace(message, attempt=attempt)
    delivery = task.candidate.delivery
    return Run(
        subscription=sub.name,
        queue=sub.queue,
        idem_key=task.key,
        message=message,
        token=Token(worker_id, epoch),
        attempt=attempt,
        crashes=crashes,
        claimed_at_us=now_us,
        created_at_us=task.created_us,
        row=arrays.place_of(ctid),
        delivery=delivery,
        history=decode_history(history),
        body=delivery.body,
        codec=task.candidate.codec,
    )


def stored_run(sub: Subscription, row: Ready, worker_id: int, now_us: int) -> Run:
    """A row that the store holds as a run. Raises StoreCorrupt or DecodeError."""
    message = stored_message(sub, row.message_id, row.body, row.info, row.check)
    return Run(
        subscription=sub.name,
        queue=sub.queue,
        idem_key=row.key,
        lane=row.lane,
        message=msgspec.structs.replace(message, attempt=row.attempt),
        token=Token(worker_id, row.epoch),
        attempt=row.attempt,
        crashes=row.crashes,
        claimed_at_us=now_us,
        created_at_us=to_us(message.created_at),
        history=decode_history(row.history),
        body=row.body or b"",
        body_info=row.info or "",
    )


def row_uuid(raw: bytes) -> str:
    return str(uuid.UUID(bytes=raw))
