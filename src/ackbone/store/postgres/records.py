"""`PostgresRecords`: the store as operators read it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from ackbone.core.records import LedgerEvent, Waiting
from ackbone.pgserver.arrays import moment, us
from ackbone.store.record_rows import text_id, waiting_of_row
from ackbone.store.records import StoreRecords
from ackbone.store.sql import worded
from ackbone.store.sql.records import EVENT
from ackbone.store.unit import OUTGOING, WORK, Row

from .sql import SQL, WORDS
from .store import PostgresStore

LATE_US = 2_000_000
"""A follower of the ledger looks back this far for events that became visible late."""
_ID_BITS = 128
_NOW = f"SELECT {us('clock_timestamp()')}"
_EVENTS_AFTER = (
    f"{worded(EVENT, WORDS)} WHERE created_at >= {moment('$1::bigint')}"
    f" AND (created_at, id) > ({moment('$1::bigint')}, $2::uuid)"
    " ORDER BY created_at, id LIMIT $3::int"
)
_SENT = (
    "SELECT queue, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),"
    f" {us('min(sent_at) FILTER (WHERE state = 0)')} FROM messages GROUP BY queue"
)
_SENT_WITH_TEXT = (
    f"SELECT queue, message_id, state, priority, lane, {us('sent_at')}, {us('due_at')},"
    f" {us('expires_at')}, headers::text, body, body_crc FROM messages"
    " WHERE message_id = $1 OR position($2::bytea IN body) > 0"
    " ORDER BY message_id <> $1, seq LIMIT $3::int"
)
_LAST_EVENT = (
    f"SELECT uuid_send(id), {us('created_at')} FROM event_log"
    " ORDER BY created_at DESC, id DESC OFFSET $1::int LIMIT 1"
)


class PostgresRecords(StoreRecords):
    """`Records` of one database, and of the broker's queue in it."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store.read, SQL)
        self._store = store
        self._first: int | None = None
        """Position at which this reader began to follow the ledger."""
        self._returned: dict[int, int] = {}
        """Positions of the events that were returned in the last seconds, with their times."""

    async def waiting_with(self, text: str, *, limit: int) -> Sequence[Waiting]:
        """Messages in the queue of this database. Queues elsewhere cannot be searched here."""
        part = text.encode("utf-8", "surrogatepass")
        return [waiting_of_row(row) for row in await self._read(_SENT_WITH_TEXT, text, part, limit)]

    async def _now_us(self) -> int:
        ((now_us,),) = await self._read(_NOW)
        return int(now_us)

    async def _sent(self) -> list[Row]:
        return await self._read(_SENT)

    def _place(self, number: int) -> str:
        return text_id(number.to_bytes(16, "big"))

    def _place_number(self, place: bytes) -> int:
        return int.from_bytes(place, "big")

    # -- the ledger, whose positions are a time and an id -----------------------------------------

    async def events_after(
        self, position: int, *, limit: int, since_us: int | None = None
    ) -> Sequence[LedgerEvent]:
        """Events after a position, and earlier ones that were not visible when it was read.

        A transaction that took long becomes visible after younger ones. So each call looks back a
        little, and leaves out what it has returned before.
        """
        if since_us is not None:
            position = max(position, since_us << _ID_BITS)
        if self._first is None:
            self._first = position
        floor = max(self._first, position - (LATE_US << _ID_BITS))
        row_id = uuid.UUID(int=floor & ((1 << _ID_BITS) - 1))
        most = limit + len(self._returned)
        rows = await self._read(_EVENTS_AFTER, floor >> _ID_BITS, str(row_id), most)
        new = [each for each in self._events(rows) if each.position not in self._returned][:limit]
        self._returned.update((event.position, event.at_us) for event in new)
        if new:
            oldest = max(self._returned.values()) - 2 * LATE_US
            self._returned = {at: when for at, when in self._returned.items() if when >= oldest}
        return new

    async def last_position(self, *, back: int = 0) -> int:
        rows = await self._read(_LAST_EVENT, back)
        return self._position(*rows[0]) if rows else 0

    def _position(self, row: bytes, at_us: int) -> int:
        return at_us << _ID_BITS | int.from_bytes(row, "big")

    def subscribe(self) -> asyncio.Event:
        return self._store.subscribe_to(WORK, OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)
