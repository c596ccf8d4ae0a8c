"""How messages ended: their final events, and the failed attempts that their letters tell of."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core.events import EVENT_OF_STATUS
from holdfast.core.outcome import Status

_STATUS_OF_EVENT = {event: status for status, event in EVENT_OF_STATUS.items()}
_FINAL = (
    "SELECT event_type, data FROM event_log WHERE tenant_id = ? AND task_id = ?"
    f" AND subscription = ? AND event_type IN ({', '.join(['?'] * len(_STATUS_OF_EVENT))})"
)
_HISTORY = (
    "SELECT history FROM dead_letters WHERE tenant_id = ? AND message_id = ? AND subscription = ?"
    " ORDER BY failed_at DESC LIMIT 1"
)
_decode = msgspec.json.Decoder().decode


class FinalEvent(NamedTuple):
    """A message's one final event, with its history where it failed."""

    status: Status
    data: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]


def final_events(
    conn: sqlite3.Connection, subscription: str, identities: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], FinalEvent]:
    """By (tenant, task id), those of the given messages that have ended."""
    found: dict[tuple[str, str], FinalEvent] = {}
    for identity in identities:
        row = conn.execute(_FINAL, (*identity, subscription, *_STATUS_OF_EVENT)).fetchone()
        if row is None:
            continue
        event_type, data = row
        letter = conn.execute(_HISTORY, (*identity, subscription)).fetchone()
        history = _decode(letter[0]) if letter is not None and letter[0] else ()
        found[identity] = FinalEvent(_STATUS_OF_EVENT[event_type], _decode(data), history)
    return found
