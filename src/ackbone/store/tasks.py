"""Tasks: what a broker's copy writes into its row, and the run that a row becomes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.clock import to_us
from ackbone.core.codecs.codec import CODECS, stored_form
from ackbone.core.errors import StoreCorrupt
from ackbone.core.ids import derived_id
from ackbone.core.message import Message
from ackbone.core.store import Candidate, Run, Token

if TYPE_CHECKING:
    from .claiming import Claiming

_COPY = ("sent_at_us", "priority", "key")
_INFO: dict[str, str] = {name: stored_form(codec, {}) for name, codec in CODECS.items()}
_COPY_INFO: dict[str, str] = {
    name: stored_form(codec, codec.headers).removesuffix("}") for name, codec in CODECS.items()
}
"""The stored form of a message without headers of its own, up to the fields of its copy."""
_decode_json = msgspec.json.Decoder().decode
crc = zlib.crc32


class Task(msgspec.Struct):
    """A broker's copy that asks for a row."""

    at: int
    """Its place in the batch."""
    candidate: Candidate
    message: Message
    form: str
    """How the stored body is read again; empty if the broker keeps it."""
    key: str | None
    created_us: int
    expires_us: int | None
    row: int = 0
    """Where the row is, as a hint for `finish`."""
    epoch: int = 1
    """More than 1: the row was `open`, and the fields below are from it."""
    attempt: int = 1
    crashes: int = 0
    history: str | None = None
    lost_by: str | None = None
    """The worker that was running it when it died."""


class Existing(NamedTuple):
    """A row that was there before."""

    status: str
    held: str
    sha256: bytes | None
    """None: the task ended before a copy of it came."""
    event_name: str | None
    worker_id: int | None
    epoch: int


class Ready(NamedTuple):
    """A row that was claimed from the store."""

    tenant_id: str
    message_id: str
    epoch: int
    attempt: int
    crashes: int
    lane: str | None
    key: str | None
    expires_us: int | None
    history: str | None
    body: bytes | None
    info: str | None
    check: int | None
    lost_by: str | None
    """The worker that was running it when it died."""
    row: int


def new_task(claim: Claiming, at: int, candidate: Candidate, message: Message) -> Task:
    key, expires = message.idempotency_key, candidate.delivery.expires_at_us
    if key is not None or claim.sub.dedup_by_id:  # most have none, and a call is a call
        key = idem_key(claim.sub, message)
    if (
        expires is not None
        or message.expires_at is not None
        or candidate.delivery.expires_steady_s is not None
    ):
        expires = expires_us(candidate.delivery, message, claim.ahead)
    form = body_info(candidate) if claim.held == "store" else ""
    return Task(at, candidate, message, form, key, to_us(message.created_at), expires)


def new_run(claim: Claiming, task: Task, first: Token, now_us: int) -> Run:
    """The run of a message that was claimed; `first` is the token of rows that are new."""
    delivery, message = task.candidate.delivery, task.message
    if task.attempt > 1:
        message = msgspec.structs.replace(message, attempt=task.attempt)
    return Run(
        subscription=claim.sub.name,
        queue=claim.sub.queue,
        idem_key=task.key,
        message=message,
        token=first if task.epoch == 1 else Token(first.worker_id, task.epoch),
        attempt=task.attempt,
        crashes=task.crashes,
        claimed_at_us=now_us,
        created_at_us=task.created_us,
        row=task.row,
        delivery=delivery if claim.held == "broker" else None,
        history=decode_history(task.history) if task.history else (),
        body=delivery.body,
        body_info=task.form,
        codec=task.candidate.codec,
    )


def stored_run(claim: Claiming, row: Ready, now_us: int) -> Run:
    """The run of a row that the store holds. Raises StoreCorrupt or DecodeError."""
    message = stored_message(claim.sub, row.message_id, row.body, row.info, row.check)
    return Run(
        subscription=claim.sub.name,
        queue=claim.sub.queue,
        idem_key=row.key,
        lane=row.lane,
        message=msgspec.structs.replace(message, attempt=row.attempt),
        token=Token(claim.worker.worker_id, row.epoch),
        attempt=row.attempt,
        crashes=row.crashes,
        claimed_at_us=now_us,
        created_at_us=to_us(message.created_at),
        row=row.row,
        history=decode_history(row.history),
        body=row.body or b"",
        body_info=row.info or "",
    )


# -- the message of a row --------------------------------------------------------------------------


def idem_key(sub: Subscription, message: Message) -> str | None:
    """The key that this message is deduplicated by, if any."""
    if not sub.dedup:
        return None
    if message.idempotency_key is not None:
        return message.idempotency_key
    return message.id if sub.dedup_by_id else None


def what_differs(sub: Subscription, candidate: Candidate, message: Message, row: Existing) -> str:
    """Return what makes this another message than the row with its id: "payload", "type" or "".

    A message without a type gets the one of the configuration, which may have changed since the
    broker brought the first copy. That does not count as a difference.
    """
    if row.sha256 is None:
        return ""
    if row.sha256 != candidate.sha256:
        return "payload"
    if row.event_name in (None, message.type):
        return ""
    return "" if row.held == "broker" and message.type == sub.default_type else "type"


def conflicting(candidate: Candidate, message: Message, differs: str) -> tuple[str, str]:
    """The id and the error text of the dead letter for a message whose id was used before."""
    parts = [message.id, candidate.sha256.hex()]
    if differs == "type":
        parts.append(message.type)
    return derived_id(*parts), f"message id {message.id} was used before, with another {differs}"


class Ahead(NamedTuple):
    """How far the store's clock is ahead of this machine's clocks (µs)."""

    of_steady: int
    of_wall: int = 0


def expires_us(delivery: Delivery, message: Message, ahead: Ahead) -> int | None:
    """When a message's time to live is over, by the store's clock: as the broker or as the envelope
    says, whichever is earlier.

    If the broker has another clock than the store, only the broker counts: it has the same time to
    live, measured by one clock. The envelope names a moment of the sender's clock, and this
    machine's clock is taken for that.
    """
    if delivery.expires_steady_s is not None:
        return ahead.of_steady + int(delivery.expires_steady_s * 1e6)
    theirs = delivery.expires_at_us
    if message.expires_at is None:  # nearly always, and asked for every message
        return theirs
    own = to_us(message.expires_at) + ahead.of_wall
    return own if theirs is None else min(own, theirs)


def body_info(candidate: Candidate) -> str:
    """How to read the stored body again, with the properties that only the broker's copy has."""
    return _info(candidate.delivery, candidate.codec)


def run_info(run: Run) -> str:
    """The same for a run. It is worked out only for the few runs that are stored."""
    return run.body_info or ("" if run.delivery is None else _info(run.delivery, run.codec))


def _info(delivery: Delivery, codec: str) -> str:
    # `find`, because `in` tries the bytes as a number first. A standard body with its time needs
    # nothing from the copy.
    if codec == "standard" and delivery.body.find(b'"timestamp"') >= 0:
        if not delivery.headers:
            return _INFO[codec]
        return stored_form(CODECS[codec], delivery.headers)
    sent_at_us = delivery.sent_at_us
    usual = CODECS[codec].headers
    if delivery.headers == usual and delivery.key is None and sent_at_us is not None:
        # As `stored_form` writes it: with queue and store in one file, every task comes by here.
        copied = f'{{"sent_at_us":{sent_at_us},"priority":{delivery.priority},"key":null}}'
        return f'{_COPY_INFO[codec]},"copy":{copied}}}'
    copy = {name: getattr(delivery, name) for name in _COPY}
    return stored_form(CODECS[codec], delivery.headers, copy)


def decode_history(history: str | None) -> tuple[Mapping[str, Any], ...]:
    """The earlier failed attempts of a row."""
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
