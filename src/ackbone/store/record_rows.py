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
from ackbone.core.quota import QuotaUse
from ackbone.core.records import DeadLetter, Effect, LedgerEvent, Reply, Task, Waiting, WorkerState

from .claiming import read_offers

_decode = msgspec.json.Decoder().decode
_STATES = ("ready", "delayed", "taken")
"""States of a message in the embedded queue, by their number."""


def fields_of(record: type[msgspec.Struct], row: Sequence[Any]) -> dict[str, Any]:
    """The columns of a row by the names of the record's fields, which have the same order."""
    return dict(zip(record.__struct_fields__, row, strict=True))


def letter_of_row(row: Sequence[Any]) -> DeadLetter:
    """The columns of `DeadLetter` in its order, at the end `body_crc` instead of `intact`."""
    fields = fields_of(DeadLetter, row)
    fields.update(
        id=text_id(fields["id"]),
        error=fields["error"] or "",
        history=_history(fields["history"]),
        intact=is_intact(fields["body"], fields["intact"]),
    )
    return DeadLetter(**fields)


def task_of_row(row: Sequence[Any]) -> Task:
    """Place in the listing of parked tasks (not read here), then the columns of `Task` in its
    order, at the end `body_crc` instead of `intact`."""
    fields = fields_of(Task, row[1:])
    if fields["status"] == Status.SUCCEEDED:
        # A succeeded row still has the error of its last failed attempt, which is in its history.
        fields["error"] = None
    fields.update(
        retry_count=fields["retry_count"] or 0,
        history=_history(fields["history"]),
        intact=is_intact(fields["body"], fields["intact"]),
    )
    return Task(**fields)


def event_of_row(row: Sequence[Any]) -> LedgerEvent:
    """The columns of `LedgerEvent` in its order."""
    return LedgerEvent(**{**fields_of(LedgerEvent, row), "data": mapping(row[-1])})


def effect_of_row(row: Sequence[Any]) -> Effect:
    """The columns of `Effect` in its order."""
    return Effect(**fields_of(Effect, row))


def reply_of_row(row: Sequence[Any]) -> Reply:
    """The columns of `Reply` in its order."""
    fields = fields_of(Reply, row)
    fields["in_doubt"] = bool(fields["in_doubt"])
    return Reply(**fields)


def delivery_of_row(row: Sequence[Any]) -> DeliveryRecord:
    """The columns of `DeliveryRecord` in its order."""
    fields = fields_of(DeliveryRecord, row)
    fields["in_doubt"] = bool(fields["in_doubt"])
    fields["receipts"] = tuple(_decode(fields["receipts"] or "[]"))
    fields["options"] = _decode(fields["options"] or "{}")
    return DeliveryRecord(**fields)


def waiting_of_row(row: Sequence[Any]) -> Waiting:
    """The columns of `Waiting` in its order, at the end `body_crc` instead of `intact`."""
    fields = fields_of(Waiting, row)
    fields.update(
        state=_STATES[fields["state"]],
        headers=mapping(fields["headers"]),
        intact=is_intact(fields["body"], fields["intact"]),
    )
    return Waiting(**fields)


def worker_of_row(row: Sequence[Any]) -> WorkerState:
    """The columns of `WorkerState` in its order."""
    fields = fields_of(WorkerState, row)
    fields.update(alive=bool(fields["alive"]), offers=read_offers(fields["offers"]))
    return WorkerState(**fields)


def quota_use_of_row(row: Sequence[Any]) -> QuotaUse:
    """The columns of `QuotaUse` in its order, with the length of the window instead of its end."""
    fields = fields_of(QuotaUse, row)
    fields["window_end_us"] += fields["window_start_us"]
    return QuotaUse(**fields)


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
