"""Notices of ends, written with the ends themselves through the outbox.

Every final event passes through here before its commit, so that no way to end a task can forget to
tell. Only what the broker publishes together with its acknowledgement is left out (`told`): should
the worker die before that, its copy comes back, and it is told then (`again`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ackbone.core import events
from ackbone.core.broker import Notices
from ackbone.core.notices import notices_of
from ackbone.core.outcome import Status
from ackbone.core.store import Send
from ackbone.core.subscribers import Subscribers
from ackbone.store.notice import COLUMNS, add_letter, end_of
from ackbone.store.outgoing import telling_rows
from ackbone.store.unit import Change

from . import arrays
from .database import Tx
from .finish import DELIVERIES, delivery_values
from .tasks import Identity
from .wake import OUTGOING

_STATUS_OF = {event: status for status, event in events.EVENT_OF_STATUS.items()}
_TASKS = (
    f"SELECT t.tenant_id, t.subscription, t.message_id, {COLUMNS}"
    " FROM unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, message)"
    " JOIN queue_executions t ON t.tenant_id = u.tenant AND t.subscription = u.sub"
    " AND t.message_id = u.message LEFT JOIN workers w ON w.worker_id = t.worker_id"
)


class Teller:
    """Tells what ended, inside the transaction that ended it."""

    def __init__(self, to: Callable[[str], Notices | None]) -> None:
        self._to = to

    async def tell(self, tx: Tx, change: Change) -> None:
        """Of the final events of this change, less those that are told otherwise."""
        names = {entry[1] for entry in change.entries}
        if not change.again and all(self._to(name) is None for name in names):
            return
        ends: dict[Identity, tuple[Notices, Status, Mapping[str, Any]]] = {}
        letters: dict[Identity, str] = {}
        for tenant_id, subscription, task_id, kind, data in change.entries:
            identity = (tenant_id, subscription, task_id)
            if kind == events.DLQ:
                letters[identity] = data["dead_letter_id"]
            elif kind in _STATUS_OF and identity not in change.told:
                to = self._to(subscription)
                if to is not None:
                    ends[identity] = (to, _STATUS_OF[kind], data)
        for identity in change.again:
            to = self._to(identity[1])
            if to is not None and to.on_ack:
                ends.setdefault(identity, (to, Status.SUCCEEDED, {}))
        if ends:
            await self._publish(tx, change, ends, letters)

    async def _publish(
        self,
        tx: Tx,
        change: Change,
        ends: Mapping[Identity, tuple[Notices, Status, Mapping[str, Any]]],
        letters: Mapping[Identity, str],
    ) -> None:
        now_us = await tx.moment()
        wanted = sorted(ends)
        columns = [arrays.texts([identity[n] for identity in wanted]) for n in range(3)]
        rows = {row[:3]: row[3:] for row in await tx.rows(_TASKS, *columns)}
        sends: list[Send] = []
        for identity, (to, status, data) in ends.items():
            end = end_of(identity, rows[identity], status, data, now_us)
            letter_id = letters.get(identity)
            if letter_id is not None:
                letter = tx.letters[letter_id]
                add_letter(end, letter_id, letter.body, letter.body_info, letter.reason)
            sends += [
                Send(queue=queue, outgoing=out, tenant_id=identity[0])
                for queue, out in notices_of(to, end)
            ]
        change.sends += sends


async def tell_subscribers(tx: Tx, change: Change, subscribers: Subscribers) -> None:
    """Of all events of this change, by deliveries that are committed with them."""
    found = telling_rows(subscribers, change.entries, await tx.moment())
    if found:
        tx.at_end(DELIVERIES, *delivery_values(found))
        change.topics.add(OUTGOING)
