"""Rows of queue_executions: written from a candidate, read back as a run."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core.broker import Delivery, Subscription
from holdfast.core.clock import to_us
from holdfast.core.codec import CODECS, stored_form
from holdfast.core.errors import StoreCorrupt
from holdfast.core.message import Message
from holdfast.core.outcome import FINAL, Status
from holdfast.core.store import Candidate, Run, Token

from .claiming import Claiming

INSERT = (
    "INSERT OR IGNORE INTO queue_executions (subscription, queue_name, held, started_at, status,"
    " worker_id, epoch, attempt, due_at, lane, lane_seq, rowid, id, tenant_id, message_id,"
    " event_name, priority, idem_key, created_at, expires_at, correlation_id, trace_id, body,"
    " body_info, body_crc, body_sha256)"
)
ALIKE = (2, 4, 5, 12)
"""Tenant, type, priority and form of the body: places in `row`."""
RUN_COLUMNS = (
    "rowid, tenant_id, message_id, epoch, attempt, crashes, lane, idem_key, expires_at, history,"
    " body, body_info, body_crc"
)
ENDED = tuple(status.value for status in Status if status in FINAL)
FINAL_WORDS = "('" + "', '".join(ENDED) + "')"


def none_of(*words: str, column: str = "status") -> str:
    """A condition in the words of the partial indexes: only with the same ones are they used."""
    return " AND ".join(f"{column} <> '{word}'" for word in words)


UNENDED = none_of(*ENDED)
"""Not final: has something to do, or waits."""
UNCOMMON = none_of("running", "succeeded", "duplicate")
"""Neither running nor well ended: the few rows that a person may want to look for."""

_decode_json = msgspec.json.Decoder().decode
crc = zlib.crc32


class Task(msgspec.Struct):
    """A message that gets a row, and what the row says of it."""

    candidate: Candidate
    message: Message
    rowid: int
    form: str
    """How the stored body is read again."""
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
    epoch: int
    attempt: int
    crashes: int


def idem_key(sub: Subscription, message: Message) -> str | None:
    """The key this message is deduplicated by, if any."""
    if not sub.dedup:
        return None
    if message.idempotency_key is not None:
        return message.idempotency_key
    return message.id if sub.dedup_by_id else None


def expires_us(delivery: Delivery, message: Message) -> int | None:
    """When its time to live is over: the broker's word or the envelope's, whichever is earlier."""
    theirs = delivery.expires_at_us
    if message.expires_at is None:
        return theirs
    own = to_us(message.expires_at)
    return own if theirs is None else min(own, theirs)


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
    if message.expires_at is not None:
        expires = expires_us(candidate.delivery, message)
    return Task(
        candidate, message, rowid, body_info(candidate), key, to_us(message.created_at), expires
    )


def row(claim: Claiming, task: Task, row_id: bytes) -> tuple[Any, ...]:
    """Values for `INSERT`. The body and its form stay only where the store holds the message."""
    candidate, message = task.candidate, task.message
    body: bytes | None = None
    info: str | None = None
    body_crc: int | None = None
    if claim.held == "store":
        delivery = candidate.delivery
        body, info, body_crc = delivery.body, task.form, delivery.crc
        if body_crc is None:
            body_crc = crc(body)
    return (
        task.rowid,
        row_id,
        message.tenant_id,
        message.id,
        message.type,
        message.priority,
        task.key,
        task.created_us,
        task.expires_us,
        message.correlation_id,
        None if message.trace is None else message.trace_id,
        body,
        info,
        body_crc,
        candidate.sha256,
    )


def max_rowid(conn: sqlite3.Connection) -> int:
    found: int | None = conn.execute("SELECT max(rowid) FROM queue_executions").fetchone()[0]
    return found or 0


def find(conn: sqlite3.Connection, sub: Subscription, message: Message) -> Existing | None:
    """The row of a message, by its identity."""
    found = conn.execute(
        "SELECT rowid, status, held, body_sha256, epoch, attempt, crashes FROM queue_executions"
        " WHERE tenant_id = ? AND subscription = ? AND message_id = ?",
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


_COPY = ("sent_at_us", "priority", "key")
_INFO: dict[str, str] = {name: stored_form(codec, {}) for name, codec in CODECS.items()}


def body_info(candidate: Candidate) -> str:
    """How to read the stored body again, with what only the broker's copy says of it."""
    delivery = candidate.delivery
    # `find`: `in` tries the bytes as a number first. With its time, the standard form says all.
    if candidate.codec == "standard" and delivery.body.find(b'"timestamp"') >= 0:
        if not delivery.headers:
            return _INFO[candidate.codec]
        return stored_form(CODECS[candidate.codec], delivery.headers)
    copy = {name: getattr(delivery, name) for name in _COPY}
    return stored_form(CODECS[candidate.codec], delivery.headers, copy)


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
    )


def run_of_row(claim: Claiming, found: Sequence[Any]) -> Run:
    """A claimed row (RUN_COLUMNS) as a run. Raises StoreCorrupt or DecodeError."""
    rowid, _, message_id, epoch, attempt, crashes, lane, key, _, history, body, info, check = found
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


def decode_history(history: str | None) -> tuple[Mapping[str, Any], ...]:
    """Earlier failed attempts, as they were stored."""
    return tuple(_decode_json(history)) if history else ()


def stored_message(
    sub: Subscription, message_id: str, body: bytes | None, info: str | None, check: int | None
) -> Message:
    """The message of a stored body. Raises StoreCorrupt or DecodeError."""
    if body is None or info is None:
        raise StoreCorrupt(f"message {message_id}: its body is not in the store")
    if crc(body) != check:
        raise StoreCorrupt(
            f"message {message_id}: the stored body does not match its checksum; it was changed "
            "on disk and is not run"
        )
    try:
        form = _decode_json(info)
        codec = CODECS[form["codec"]]
        headers = dict(form.get("headers") or {})
        copy = {name: form["copy"][name] for name in _COPY} if "copy" in form else {}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(
            f"message {message_id}: its stored form is unreadable: {error}"
        ) from None
    delivery = Delivery(body=body, headers=headers, tag=None, identity=message_id, **copy)
    message = codec.decode(delivery, sub)
    if message.id != message_id:
        message = msgspec.structs.replace(message, id=message_id)
    return message
