"""Notices of ends, written with the ends themselves: as rows of the outbox, or into the queue.

Every final event passes through the ledger; from there it comes here, so that no way to end a task
can forget to tell. Only what the broker publishes together with its acknowledgement is left out
(`told`): should the worker die before that, its copy comes back, and `again` tells.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.broker import Notices, Outgoing, Transactional
from ackbone.core.notices import End, notices_of
from ackbone.core.outcome import Status
from ackbone.core.store import Send
from ackbone.sqlite import rows
from ackbone.sqlite.wake import OUTGOING
from ackbone.store.notice import COLUMNS, add_letter, end_of
from ackbone.store.outgoing import outbox_row

from .outbox_rows import OUTBOX

Identity = tuple[str, str, str]
"""tenant_id, subscription, message_id"""
_STATUS_OF = {event: status for status, event in events.EVENT_OF_STATUS.items()}
_TOLD_OF = events.FINAL_EVENTS | {events.DLQ}
_TASK = (
    f"SELECT {COLUMNS}"
    " FROM queue_executions t LEFT JOIN workers w ON w.worker_id = t.worker_id"
    " WHERE t.tenant_id = ? AND t.subscription = ? AND t.message_id = ?"
)


class NoticeWriter:
    """Tells what ended, inside the transaction that ended it."""

    def __init__(
        self,
        to: Callable[[str], Notices | None],
        queue: Transactional | None,
        wake: Callable[..., None],
    ) -> None:
        self._to = to
        self._queue = queue
        self._wake = wake

    def tell(
        self,
        conn: sqlite3.Connection,
        entries: Sequence[events.Entry],
        told: Collection[Identity],
        now_us: int,
    ) -> None:
        """Of the final events among the entries, less those that are told otherwise."""
        asking = {
            subscription: to
            for subscription in {entry[1] for entry in entries}
            if (to := self._to(subscription)) is not None
        }
        if not asking:
            return
        over = [entry for entry in entries if entry[3] in _TOLD_OF and entry[1] in asking]
        letters: dict[Identity, str] = {}
        ends: list[tuple[Notices, events.Entry]] = []
        for entry in over:
            tenant_id, subscription, task_id, kind, data = entry
            if kind == events.DLQ:
                letters[(tenant_id, subscription, task_id)] = data["dead_letter_id"]
            elif (tenant_id, subscription, task_id) not in told:
                ends.append((asking[subscription], entry))
        notices: list[tuple[str, str, Outgoing]] = []
        for to, (tenant_id, subscription, task_id, kind, data) in ends:
            identity = (tenant_id, subscription, task_id)
            end = _end(conn, identity, _STATUS_OF[kind], data, now_us)
            letter = letters.get(identity)
            if letter is not None:
                _add_letter(conn, end, letter)
            notices += [(tenant_id, queue, out) for queue, out in notices_of(to, end)]
        self._publish(conn, notices, now_us)

    def again(self, conn: sqlite3.Connection, identity: Identity, now_us: int) -> None:
        """A success whose copy came back: nobody may have been told. The mark keeps it to one."""
        to = self._to(identity[1])
        if to is not None and to.on_ack:
            end = _end(conn, identity, Status.SUCCEEDED, {}, now_us)
            told = [(identity[0], queue, out) for queue, out in notices_of(to, end)]
            self._publish(conn, told, now_us)

    def _publish(
        self, conn: sqlite3.Connection, notices: Sequence[tuple[str, str, Outgoing]], now_us: int
    ) -> None:
        if not notices:
            return
        if self._queue is None:
            sends = [Send(queue=q, outgoing=out, tenant_id=t) for t, q, out in notices]
            rows.insert(conn, OUTBOX, [outbox_row(send, now_us) for send in sends])
            self._wake(OUTGOING)
            return
        queues: dict[str, list[Outgoing]] = {}
        for _, queue, out in notices:
            queues.setdefault(queue, []).append(out)
        for queue, batch in queues.items():
            self._queue.publish_in(conn, queue, batch)


def _end(
    conn: sqlite3.Connection, identity: Identity, status: Status, data: Any, now_us: int
) -> End:
    return end_of(identity, conn.execute(_TASK, identity).fetchone(), status, data, now_us)


def _add_letter(conn: sqlite3.Connection, end: End, letter: str) -> None:
    found = conn.execute(
        "SELECT body, body_info, reason FROM dead_letters WHERE id = ?", (uuid.UUID(letter).bytes,)
    ).fetchone()
    add_letter(end, letter, *found)
