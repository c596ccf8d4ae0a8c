"""Dead letters: what could not be processed, kept whole with its reason and history (P6)."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ackbone.core import events
from ackbone.core.events import Entry
from ackbone.core.ids import uuid7_bytes
from ackbone.core.store import Run
from ackbone.core.text import storable

from .tasks import run_info
from .unit import Tx

_encode = msgspec.json.Encoder().encode


class Letter(msgspec.Struct, kw_only=True):
    """What is kept of a message that ended badly."""

    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    event_name: str | None
    reason: str
    error: str = ""
    retry_count: int = 0
    history: Sequence[Mapping[str, Any]] = ()
    body: bytes | None = None
    body_info: str | None = None


def letter_of(run: Run, reason: str, error: str) -> Letter:
    """The dead letter of a claimed message."""
    message = run.message
    return Letter(
        tenant_id=message.tenant_id,
        subscription=run.subscription,
        message_id=message.id,
        queue=run.queue,
        event_name=message.type,
        reason=reason,
        error=error,
        retry_count=max(0, run.failures),
        history=run.history,
        body=run.body,
        body_info=run_info(run),
    )


def bury(tx: Tx, letter: Letter, now_us: int) -> Entry:
    """Write the dead letter with the commit; returns its ledger entry (`task.dlq`)."""
    letter_id = str(uuid.UUID(bytes=uuid7_bytes()))
    tx.letters[letter_id] = letter
    tx.at_end(
        tx.sql.operations.write_letter,
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
    )
    data = {"dead_letter_id": letter_id, "reason": letter.reason, "queue": letter.queue}
    return letter.tenant_id, letter.subscription, letter.message_id, events.DLQ, data
