"""Rows as people see them. The order of the columns is the builders'; times are microseconds, ids
of rows are 16 bytes, JSON is text: each dialect selects them so.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from ackbone.core.outcome import Status
from ackbone.core.records import DeadLetter, LedgerEvent, Task

_decode = msgspec.json.Decoder().decode
HIGHEST = chr(0x10FFFF)


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
    """The first column is the dialect's own; then as `Task` has them, and history, result, body,
    body_info, body_crc."""
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


def _history(text: str | None) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(_decode(text)) if text else ()
    except (msgspec.DecodeError, TypeError):
        return ()


def mapping(text: str) -> dict[str, Any]:
    """JSON of a row; what cannot be read is shown as it stands."""
    try:
        found = _decode(text)
    except msgspec.DecodeError:
        found = text
    return found if isinstance(found, dict) else {"text": found}


def is_intact(body: object, crc: int | None) -> bool:
    """Is the body the one that was written? A body that is no longer bytes is not."""
    if body is None or crc is None:
        return True
    return isinstance(body, bytes) and zlib.crc32(body) == crc


def text_id(blob: bytes) -> str:
    """The id of a row as people see it."""
    return str(uuid.UUID(bytes=blob))


def uuid_text(name: str) -> str | None:
    """The id of a row, if a person's text is one."""
    try:
        return str(uuid.UUID(name))
    except ValueError:
        return None


def id_bytes(text: str) -> bytes:
    """The id as the table holds it; an id that is none fits nothing."""
    try:
        return uuid.UUID(text).bytes
    except ValueError:
        return b""
