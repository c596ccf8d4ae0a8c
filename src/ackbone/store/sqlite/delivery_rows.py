"""Writes of many deliveries, and of messages that leave by the outbox."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from ackbone.core.outbound.send_order import PutOff
from ackbone.core.outbound.settling import AttemptEnd, EndedRow
from ackbone.core.store import Send
from ackbone.sqlitefile import rows
from ackbone.store.delivery_rows import DELIVERY_COLUMNS, DeliveryRow, WindowRow
from ackbone.store.outbox import outbox_row

INSERT = f"INSERT OR IGNORE INTO deliveries ({DELIVERY_COLUMNS})"
PUT_OFF = "UPDATE deliveries SET due_at = ?, put_off_by = ? WHERE id = ?"
END = (
    "UPDATE deliveries SET status = ?1, last_error = ?2, due_at = coalesce(?3, due_at),"
    " retry_count = coalesce(retry_count + ?4, 0), in_doubt = coalesce(?5, in_doubt),"
    " receipts = CASE WHEN ?6 IS NULL THEN receipts"
    " ELSE json_insert(coalesce(receipts, '[]'), '$[#]', ?6) END,"
    " resent = resent + ?7"
    " WHERE id = ?8 AND status = 'sending' AND worker_id = ?9 AND calls = ?10"
    " RETURNING tenant_id, coalesce(subscription, ''), coalesce(task_id, ''), lane, retry_count,"
    " coalesce(json_array_length(receipts), 0)"
)
SAVE_WINDOWS = "INSERT INTO send_windows (key, state, ends_at)"
SAVED_BEFORE = "ON CONFLICT (key) DO UPDATE SET state = excluded.state, ends_at = excluded.ends_at"
OUTBOX = (
    "INSERT INTO outbox (id, tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
    " ordering_key, ttl_us, due_at, created_at)"
)


class SqliteDeliveryRows:
    """`ackbone.store.delivery_rows.DeliveryRows` on the connection of the writer thread."""

    def __init__(self, conn: sqlite3.Connection) -> None:
        self._conn = conn

    def insert(self, found: Sequence[DeliveryRow]) -> None:
        rows.insert(self._conn, INSERT, found)

    async def add(self, row: DeliveryRow) -> bool:
        return rows.insert(self._conn, INSERT, [row]) == 1

    async def put_off(self, found: Sequence[PutOff]) -> None:
        values = [(each.until_us, each.by, each.due.reply.id) for each in found]
        self._conn.executemany(PUT_OFF, values)

    async def end(
        self, batch: Sequence[AttemptEnd], worker_id: int, now_us: int
    ) -> dict[tuple[str, int], EndedRow]:
        ended: dict[tuple[str, int], EndedRow] = {}
        for each in batch:
            values = (
                each.status,
                each.error,
                None if each.wait_us is None else now_us + each.wait_us,
                each.retries,
                each.in_doubt,
                each.receipt,
                each.resent,
                each.id,
                worker_id,
                each.call,
            )
            found = self._conn.execute(END, values).fetchone()
            if found is not None:
                ended[(each.id, each.call)] = EndedRow(*found)
        return ended

    async def save_windows(self, found: Sequence[WindowRow]) -> None:
        rows.insert(self._conn, SAVE_WINDOWS, found, SAVED_BEFORE)

    def publish(self, sends: Sequence[Send], now_us: int) -> None:
        rows.insert(self._conn, OUTBOX, [outbox_row(send, now_us) for send in sends])
