"""Dead letters: written with the commit of what made them."""

from __future__ import annotations

import uuid
import zlib

import msgspec

from holdfast.core import events
from holdfast.core.ids import uuid7_bytes
from holdfast.core.text import storable
from holdfast.store.letter import Letter

from .arrays import moment
from .database import Tx
from .ledger import Entry

_encode = msgspec.json.Encoder().encode

_INSERT = (
    "INSERT INTO dead_letters (id, tenant_id, subscription, message_id, queue_name, event_name,"
    " reason, error, retry_count, history, body, body_info, body_crc, failed_at) VALUES ($1::uuid,"
    " $2, $3, $4, $5, $6, $7, $8, $9::int, $10::json, $11::bytea, $12::json, $13::bigint,"
    f" {moment('$14::bigint')})"
)


def bury(tx: Tx, letter: Letter, now_us: int) -> Entry:
    """Write the dead letter with the commit; returns its ledger entry (`task.dlq`)."""
    letter_id = str(uuid.UUID(bytes=uuid7_bytes()))
    tx.letters[letter_id] = letter
    tx.at_end(
        _INSERT,
        letter_id,
        letter.tenant_id,
        letter.subscription,
        letter.message_id,
        letter.queue,
        letter.event_name,
        letter.reason,
        storable(letter.error),
        str(letter.retry_count),
        _encode(list(letter.history)).decode(),
        letter.body,
        letter.body_info,
        None if letter.body is None else str(zlib.crc32(letter.body)),
        str(now_us),
    )
    data = {"dead_letter_id": letter_id, "reason": letter.reason, "queue": letter.queue}
    return letter.tenant_id, letter.subscription, letter.message_id, events.DLQ, data
