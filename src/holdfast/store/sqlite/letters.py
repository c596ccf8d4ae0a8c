"""Dead letters: what could not be processed, kept whole with its reason and history (P6)."""

from __future__ import annotations

import sqlite3
import uuid
import zlib

import msgspec

from holdfast.core import events
from holdfast.core.ids import uuid7_bytes
from holdfast.core.text import storable
from holdfast.store.letter import Letter

from .ledger import Entry

_encode = msgspec.json.Encoder().encode


def bury(conn: sqlite3.Connection, letter: Letter, now_us: int) -> Entry:
    """Write the dead letter; returns its ledger entry (`task.dlq`)."""
    letter_id = uuid7_bytes()
    conn.execute(
        "INSERT INTO dead_letters (id, tenant_id, subscription, message_id, queue_name, event_name,"
        " reason, error, retry_count, history, body, body_info, body_crc, failed_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            letter_id,
            letter.tenant_id,
            letter.subscription,
            letter.message_id,
            letter.queue,
            letter.event_name,
            letter.reason,
            storable(letter.error),
            letter.retry_count,
            _encode(list(letter.history)).decode(),
            letter.body,
            letter.body_info,
            None if letter.body is None else zlib.crc32(letter.body),
            now_us,
        ),
    )
    shown = str(uuid.UUID(bytes=letter_id))
    data = {"dead_letter_id": shown, "reason": letter.reason, "queue": letter.queue}
    return letter.tenant_id, letter.subscription, letter.message_id, events.DLQ, data
