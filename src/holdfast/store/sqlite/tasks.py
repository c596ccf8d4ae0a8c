"""Rows of queue_executions: written from a candidate, read back as a run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.core.broker import Delivery, Subscription
from holdfast.core.clock import to_us
from holdfast.core.codec import CODECS, stored_form
from holdfast.core.errors import StoreCorrupt
from holdfast.core.ids import task_uuid
from holdfast.core.message import Message
from holdfast.core.store import Candidate, Run, Token

INSERT = (
    "INSERT OR IGNORE INTO queue_executions (rowid, id, tenant_id, subscription, message_id,"
    " queue_name, event_name, status, held, worker_id, epoch, attempt, priority, lane, lane_seq,"
    " idem_key, due_at, created_at, expires_at, started_at, correlation_id, trace_id, body,"
    " body_info, body_crc, body_sha256)"
)
RUN_COLUMNS = (
    "rowid, tenant_id, message_id, queue_name, epoch, attempt, crashes, lane, idem_key, expires_at,"
    " history, body, body_info, body_crc"
)
FINAL_WORDS = "('succeeded', 'failed', 'rejected', 'expired', 'discarded', 'duplicate')"

_decode_json = msgspec.json.Decoder().decode


def idem_key(sub: Subscription, message: Message) -> str | None:
    """The key this message is deduplicated by, if any."""
    if not sub.dedup:
        return None
    if message.idempotency_key is not None:
        return message.idempotency_key
    return message.id if sub.dedup_by_id else None


def expires_us(delivery: Delivery, message: Message) -> int | None:
    """When its time to live is over: the broker's word or the envelope's, whichever is earlier."""
    own = None if message.expires_at is None else to_us(message.expires_at)
    if delivery.expires_at_us is None or own is None:
        return own if delivery.expires_at_us is None else delivery.expires_at_us
    return min(own, delivery.expires_at_us)


def crc(body: bytes) -> int:
    return zlib.crc32(body)


def row(
    candidate: Candidate,
    message: Message,
    sub: Subscription,
    *,
    rowid: int,
    status: str,
    held: str,
    worker_id: int | None,
    claimed: int,
    lane: str | None,
    lane_seq: int | None,
    now_us: int,
) -> tuple[Any, ...]:
    """Values for `INSERT`. The body is kept only where the store holds the message."""
    stored = held == "store"
    body = candidate.delivery.body
    return (
        rowid,
        task_uuid(message.tenant_id, sub.name, message.id),
        message.tenant_id,
        sub.name,
        message.id,
        sub.queue,
        message.type,
        status,
        held,
        worker_id,
        claimed,
        claimed,
        message.priority,
        lane,
        lane_seq,
        idem_key(sub, message),
        None if claimed else now_us,
        to_us(message.created_at),
        expires_us(candidate.delivery, message),
        now_us,
        message.correlation_id,
        message.trace_id if message.trace is not None else None,
        body if stored else None,
        body_info(candidate) if stored else None,
        zlib.crc32(body) if stored else None,
        candidate.sha256,
    )


_INFO: dict[str, str] = {name: stored_form(codec, {}) for name, codec in CODECS.items()}


def body_info(candidate: Candidate) -> str:
    """How to read the stored body again."""
    headers = candidate.delivery.headers
    if not headers:
        return _INFO[candidate.codec]
    return stored_form(CODECS[candidate.codec], headers)


def stored_message(
    sub: Subscription, message_id: str, body: bytes | None, info: str | None, crc: int | None
) -> Message:
    """The message of a stored body. Raises StoreCorrupt or DecodeError."""
    if body is None or info is None:
        raise StoreCorrupt(f"message {message_id}: its body is not in the store")
    if zlib.crc32(body) != crc:
        raise StoreCorrupt(
            f"message {message_id}: the stored body does not match its checksum; it was changed "
            "on disk and is not run"
        )
    try:
        form = _decode_json(info)
        codec = CODECS[form["codec"]]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise StoreCorrupt(
            f"message {message_id}: its stored form is unreadable: {error}"
        ) from None
    delivery = Delivery(body=body, headers=form.get("headers") or {}, tag=None, identity=message_id)
    message = codec.decode(delivery, sub)
    if message.id != message_id:
        message = msgspec.structs.replace(message, id=message_id)
    return message


def run_of_row(sub: Subscription, found: Sequence[Any], *, worker_id: int, now_us: int) -> Run:
    """A claimed row (RUN_COLUMNS) as a run. Raises StoreCorrupt or DecodeError."""
    rowid, _tenant, message_id, _queue, epoch, attempt, crashes, *_rest = found
    history, body, info, crc = found[-4:]
    message = stored_message(sub, message_id, body, info, crc)
    return Run(
        subscription=sub.name,
        queue=sub.queue,
        idem_key=found[8],
        lane=found[7],
        message=msgspec.structs.replace(message, attempt=attempt),
        token=Token(worker_id, epoch),
        attempt=attempt,
        crashes=crashes,
        claimed_at_us=now_us,
        row=rowid,
        history=tuple(_decode_json(history)) if history else (),
        body=body,
        body_info=info,
    )
