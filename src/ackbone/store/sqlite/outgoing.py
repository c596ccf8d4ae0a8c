"""Messages that leave with a commit: into the queue of the same file, or into the outbox."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from ackbone.core.broker import Transactional
from ackbone.core.store import Send
from ackbone.sqlitefile import rows
from ackbone.store.outbox import outbox_row

OUTBOX = (
    "INSERT INTO outbox (id, tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
    " ordering_key, ttl_us, due_at, created_at)"
)


class SqliteOutgoing:
    """`OutgoingRows` in a transaction of the writer thread."""

    def __init__(self, conn: sqlite3.Connection, queue: Transactional | None) -> None:
        """`queue`: the broker whose queue is in the same file, if there is one."""
        self._conn = conn
        self._queue = queue

    def publish(self, sends: Sequence[Send], now_us: int) -> bool:
        if self._queue is None:
            rows.insert(self._conn, OUTBOX, [outbox_row(send, now_us) for send in sends])
            return True
        queues: dict[str, list[Send]] = {}
        for send in sends:
            queues.setdefault(send.queue, []).append(send)
        for queue, batch in queues.items():
            self._queue.publish_in(self._conn, queue, [send.outgoing for send in batch])
        return False
