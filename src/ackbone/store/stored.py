"""What a row says of its message: the parts that are the same in every dialect."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from ackbone.core.broker import FLAT, Delivery, Subscription
from ackbone.core.clock import to_us
from ackbone.core.codec import CODECS, stored_form
from ackbone.core.errors import StoreCorrupt
from ackbone.core.ids import derived_id
from ackbone.core.message import Message
from ackbone.core.outcome import FINAL, Status
from ackbone.core.store import Candidate, Run

ENDED = tuple(status.value for status in Status if status in FINAL)
FINAL_WORDS = "('" + "', '".join(ENDED) + "')"
_COPY = ("sent_at_us", "priority", "key")
_INFO: dict[str, str] = {name: stored_form(codec, {}) for name, codec in CODECS.items()}
_FLAT = {FLAT: "1"}
_FLAT_INFO: dict[str, str] = {
    name: stored_form(codec, _FLAT).removesuffix("}") for name, codec in CODECS.items()
}
"""Of an entry with fields: all but what differs from one to the next."""
_decode_json = msgspec.json.Decoder().decode
crc = zlib.crc32


def none_of(*words: str, column: str = "status") -> str:
    """A condition in the words of the partial indexes: only with the same ones are they used."""
    return " AND ".join(f"{column} <> '{word}'" for word in words)


UNENDED = none_of(*ENDED)
"""Not final: has something to do, or waits."""
UNCOMMON = none_of("running", "succeeded", "duplicate")
"""Neither running nor well ended: the few rows that a person may want to look for."""


KNOWN_EFFECT = (
    # As `EffectUnknown` says it: what it waits for is the effect named in its reason.
    "q.status = 'parked' AND q.parked_kind = 'effect_unknown' AND EXISTS (SELECT 1 FROM effects e"
    " WHERE e.tenant_id = q.tenant_id AND e.subscription = q.subscription"
    " AND e.message_id = q.message_id AND e.state = 'done' AND"
    " substr(q.error_message, 1, length(e.name) + 9)"
    " IN ('effect ''' || e.name || '''', 'effect \"' || e.name || '\"'))"
)
"""A message that is parked for an effect whose result was recorded later, by a worker that had
stood still."""


def idem_key(sub: Subscription, message: Message) -> str | None:
    """The key this message is deduplicated by, if any."""
    if not sub.dedup:
        return None
    if message.idempotency_key is not None:
        return message.idempotency_key
    return message.id if sub.dedup_by_id else None


class Known(Protocol):
    """The columns of a stored row that tell one message from another with the same id."""

    @property
    def sha256(self) -> bytes | None: ...

    @property
    def event_name(self) -> str | None: ...

    @property
    def held(self) -> str: ...


def what_differs(sub: Subscription, candidate: Candidate, message: Message, row: Known) -> str:
    """What makes this another message than the row with its id: "payload", "type" or nothing.

    A message without a type gets the one of the configuration, which may have changed since its
    broker brought the first copy. That is no difference.
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
    """When its time to live is over, by the store's clock: the broker's word or the envelope's,
    whichever is earlier.

    Where the broker's clock is not the store's, its word alone counts: it has the same time to
    live, measured by one clock. What the envelope says is a moment of the sender's clock, for which
    this machine's stands.
    """
    if delivery.expires_steady_s is not None:
        return ahead.of_steady + int(delivery.expires_steady_s * 1e6)
    theirs = delivery.expires_at_us
    if message.expires_at is None:  # nearly always, and asked for every message
        return theirs
    own = to_us(message.expires_at) + ahead.of_wall
    return own if theirs is None else min(own, theirs)


def body_info(candidate: Candidate) -> str:
    """How to read the stored body again, with what only the broker's copy says of it."""
    return _info(candidate.delivery, candidate.codec)


def run_info(run: Run) -> str:
    """The same of a run. Few are ever stored: of the others nobody works it out."""
    return run.body_info or ("" if run.delivery is None else _info(run.delivery, run.codec))


def _info(delivery: Delivery, codec: str) -> str:
    # `find`: `in` tries the bytes as a number first. With its time, the standard form says all.
    if codec == "standard" and delivery.body.find(b'"timestamp"') >= 0:
        if not delivery.headers:
            return _INFO[codec]
        return stored_form(CODECS[codec], delivery.headers)
    sent_at_us = delivery.sent_at_us
    if delivery.headers == _FLAT and delivery.key is None and sent_at_us is not None:
        # As `stored_form` writes it: where one file is queue and store, every task comes by here.
        copied = f'{{"sent_at_us":{sent_at_us},"priority":{delivery.priority},"key":null}}'
        return f'{_FLAT_INFO[codec]},"copy":{copied}}}'
    copy = {name: getattr(delivery, name) for name in _COPY}
    return stored_form(CODECS[codec], delivery.headers, copy)


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
