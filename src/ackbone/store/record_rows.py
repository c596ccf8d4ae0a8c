"""Builders of records from the rows of both dialects.

Each builder's docstring gives the columns in order. Times are integer microseconds, ids of rows are
16 bytes and JSON is text: the statements of each dialect select them like that.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from ackbone.core.outbound.delivery_records import DeliveryRecord
from ackbone.core.outcome import Status
from ackbone.core.records import DeadLetter, Effect, LedgerEvent, Reply, Task, Waiting, WorkerState

from .claiming import read_offers

_decode = msgspec.json.Decoder().decode
_STATES = ("ready", "delayed", "taken")
"""States of a message in the embedded queue, by their number."""


def letter_of_row(row: Sequence[Any]) -> DeadLetter:
    """id, tenant_id, subscription, message_id, queue_name, event_name, reason, error, retry_count,
    state, failed_at, settled_at, replay_id, history, body, body_info, body_crc"""
    body, info, crc = row[14:17]
    return DeadLetter(
        id=text_id(row[0]),
        tenant_id=row[1],
        subscription=row[2],
        message_id=row[3],
        queue=row[4],
        type=row[5],
        reason=row[6],
        error=row[7] or "",
        retry_count=row[8],
        state=row[9],
        failed_at_us=row[10],
        settled_at_us=row[11],
        replay_id=row[12],
        history=_history(row[13]),
        body=body,
        body_info=info,
        intact=is_intact(body, crc),
    )


def task_of_row(row: Sequence[Any]) -> Task:
    """Place in the listing of parked tasks (not read here), then the columns in the order of the
    fields below; `body_crc` is the last one."""
    body, info, crc = row[27:30]
    return Task(
        tenant_id=row[1],
        subscription=row[2],
        message_id=row[3],
        queue=row[4],
        type=row[5],
        status=row[6],
        held=row[7],
        worker_id=row[8],
        attempt=row[9],
        crashes=row[10],
        retry_count=row[11] or 0,
        priority=row[12],
        created_at_us=row[13],
        started_at_us=row[14],
        completed_at_us=row[15],
        due_at_us=row[16],
        expires_at_us=row[17],
        duration_ms=row[18],
        parked_kind=row[19],
        # A succeeded row still has the error of its last failed attempt, which is in its history.
        error=None if row[6] == Status.SUCCEEDED else row[20],
        ordering_key=row[21],
        idempotency_key=row[22],
        correlation_id=row[23],
        trace_id=row[24],
        history=_history(row[25]),
        result=row[26],
        body=body,
        body_info=info,
        intact=is_intact(body, crc),
    )


def event_of_row(row: Sequence[Any]) -> LedgerEvent:
    """position, created_at, event_type, tenant_id, subscription, task_id, worker_id, seq, data"""
    position, at, kind, tenant_id, subscription, task_id, worker_id, seq, data = row
    return LedgerEvent(
        position=position,
        at_us=at,
        type=kind,
        tenant_id=tenant_id,
        subscription=subscription,
        task_id=task_id,
        worker_id=worker_id,
        seq=seq,
        data=mapping(data),
    )


def effect_of_row(row: Sequence[Any]) -> Effect:
    """name, state, value, worker_id, created_at, done_at"""
    return Effect(**dict(zip(Effect.__struct_fields__, row, strict=True)))


def reply_of_row(row: Sequence[Any]) -> Reply:
    """The columns of `Reply` in its order."""
    fields = dict(zip(Reply.__struct_fields__, row, strict=True))
    fields["in_doubt"] = bool(fields["in_doubt"])
    return Reply(**fields)


def delivery_of_row(row: Sequence[Any]) -> DeliveryRecord:
    """The columns of `DeliveryRecord` in its order."""
    fields = dict(zip(DeliveryRecord.__struct_fields__, row, strict=True))
    fields["in_doubt"] = bool(fields["in_doubt"])
    fields["receipts"] = tuple(_decode(fields["receipts"] or "[]"))
    fields["options"] = _decode(fields["options"] or "{}")
    return DeliveryRecord(**fields)


def waiting_of_row(row: Sequence[Any]) -> Waiting:
    """queue, message_id, state, priority, lane, sent_at, due_at, expires_at, headers, body,
    body_crc"""
    queue, message_id, state, priority, lane, sent, due, expires, headers, body, crc = row
    return Waiting(
        queue=queue,
        message_id=message_id,
        state=_STATES[state],
        priority=priority,
        ordering_key=lane,
        sent_at_us=sent,
        due_at_us=due,
        expires_at_us=expires,
        headers=mapping(headers),
        body=body,
        intact=is_intact(body, crc),
    )


def worker_of_row(row: Sequence[Any]) -> WorkerState:
    """worker_id, name, started_at, whether it is alive, running, offers"""
    worker_id, name, at, alive, running, offers = row
    return WorkerState(
        worker_id=worker_id,
        name=name,
        started_at_us=at,
        alive=bool(alive),
        running=running,
        offers=read_offers(offers),
    )


def _history(text: str | None) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(_decode(text)) if text else ()
    except (msgspec.DecodeError, TypeError):
        return ()


def mapping(text: str) -> dict[str, Any]:
    """Decode the JSON object of a row. Text that cannot be decoded is returned under `text`."""
    try:
        found = _decode(text)
    except msgspec.DecodeError:
        found = text
    return found if isinstance(found, dict) else {"text": found}


def is_intact(body: object, crc: int | None) -> bool:
    """Return True if the body is the one that was written. One that is not bytes is not."""
    if body is None or crc is None:
        return True
    return isinstance(body, bytes) and zlib.crc32(body) == crc


def text_id(blob: bytes) -> str:
    """Return the id of a row as people see it."""
    return str(uuid.UUID(bytes=blob))


def uuid_text(name: str) -> str | None:
    """Return the id of a row in its usual form, or None if this text is not an id."""
    try:
        return str(uuid.UUID(name))
    except ValueError:
        return None
