"""Messages that leave with a commit: into the queue of the same file, or into the outbox."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

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

    def __init__(
        self,
        conn: sqlite3.Connection,
        queue: Transactional | None,
        holds: Callable[[str], bool],
    ) -> None:
        """`queue`: the broker whose queues are in the same file, if there is one. `holds` returns
        True for these."""
        self._conn = conn
        self._queue = queue
        self._holds = holds

    def publish(self, sends: Sequence[Send], now_us: int) -> bool:
        queues: dict[str, list[Send]] = {}
        for send in sends:
            queues.setdefault(send.queue, []).append(send)
        elsewhere: list[Send] = []
        for queue, batch in queues.items():
            if self._queue is not None and self._holds(queue):
                self._queue.publish_in(self._conn, queue, [send.outgoing for send in batch])
            else:
                elsewhere += batch
        if elsewhere:
            rows.insert(self._conn, OUTBOX, [outbox_row(send, now_us) for send in elsewhere])
        return bool(elsewhere)
