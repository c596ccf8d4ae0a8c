"""The ledger as it grows, for those who follow it.

Events have a place by time and id. A transaction that took long becomes visible behind younger
ones: whoever follows looks back a little each time, and knows what it has told already.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ackbone.core.records import LedgerEvent
from ackbone.store.seen import event_of_row

from . import views
from .arrays import moment
from .store import PostgresStore

LATE_US = 2_000_000
_ID_BITS = 128
_AFTER = (
    f"{views.EVENT} WHERE created_at >= {moment('$1::bigint')}"
    f" AND (created_at, id) > ({moment('$2::bigint')}, $3::uuid)"
    " ORDER BY created_at, id LIMIT $4::int"
)
_LAST = f"SELECT uuid_send(id), {views.us('created_at')} FROM event_log"


def position_of(row_id: bytes, at_us: int) -> int:
    """Where an event stands."""
    return at_us << _ID_BITS | int.from_bytes(row_id, "big")


class Tail:
    """One reader's place in the ledger."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._first: int | None = None
        self._told: dict[int, int] = {}
        """Positions of the last seconds, and when their events happened."""

    async def after(self, position: int, limit: int, since_us: int | None) -> list[LedgerEvent]:
        """Events behind a position, and those before it that were late."""
        if since_us is not None:
            position = max(position, since_us << _ID_BITS)
        if self._first is None:
            self._first = position
        floor = max(self._first, position - (LATE_US << _ID_BITS))
        row_id = uuid.UUID(int=floor & ((1 << _ID_BITS) - 1))
        at_us = floor >> _ID_BITS
        rows = await self._store.read(
            _AFTER, str(at_us), str(at_us), str(row_id), str(limit + len(self._told))
        )
        found = [event_of_row((position_of(row[0], row[1]), *row[1:])) for row in rows]
        new = [event for event in found if event.position not in self._told][:limit]
        self._told.update((event.position, event.at_us) for event in new)
        if new:
            oldest = max(self._told.values()) - 2 * LATE_US
            self._told = {at: when for at, when in self._told.items() if when >= oldest}
        return new

    async def last(self, back: int) -> int:
        """Where the ledger ends, or `back` events before that."""
        rows: Sequence[tuple[bytes, int]] = await self._store.read(
            f"{_LAST} ORDER BY created_at DESC, id DESC OFFSET $1::int LIMIT 1", str(back)
        )
        return position_of(*rows[0]) if rows else 0
