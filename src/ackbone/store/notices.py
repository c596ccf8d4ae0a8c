"""Notices: messages about the end of a task, written in the transaction that ends it.

Every commit comes through here, so that no way to end a task can forget its notice. A task whose
result the broker publishes together with its acknowledgement is left out (`Change.told`). If the
worker dies before that, the broker's copy comes back, and the notice is written then
(`Change.again`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ackbone.core import events
from ackbone.core.broker import Notices
from ackbone.core.notices import End, letter_fields, notices_of
from ackbone.core.outcome import Status
from ackbone.core.store import Send

from .letters import Letter
from .unit import Change, Identity, Tx

NoticesOf = Callable[[str], Notices | None]
"""The queues that notices of a subscription go to; None: the subscription has no notices."""
_Ended = tuple[Notices, Status, Mapping[str, Any]]
_STATUS_OF = {event: status for status, event in events.EVENT_OF_STATUS.items()}
_RELEVANT = frozenset({*_STATUS_OF, events.DLQ})
_encode = msgspec.json.Encoder().encode


async def add_notices(tx: Tx, change: Change, notices: NoticesOf) -> None:
    """Add the notices of all tasks that this change ends to the messages that it publishes."""
    names = {entry[1] for entry in change.entries}
    if not change.again and all(notices(name) is None for name in names):
        return
    ends: dict[Identity, _Ended] = {}
    letters: dict[Identity, str] = {}
    for tenant_id, subscription, task_id, kind, data in change.entries:
        if kind not in _RELEVANT:
            continue
        identity = (tenant_id, subscription, task_id)
        if kind == events.DLQ:
            letters[identity] = data["dead_letter_id"]
        elif identity not in change.told:
            to = notices(subscription)
            if to is not None:
                ends[identity] = (to, _STATUS_OF[kind], data)
    for identity in change.again:
        to = notices(identity[1])
        if to is not None and to.on_ack:
            ends.setdefault(identity, (to, Status.SUCCEEDED, {}))
    if not ends:
        return
    now_us = await tx.moment()
    found = await tx.rows(tx.sql.store.ended_tasks, _encode(sorted(ends)).decode())
    rows = {row[:3]: row[3:] for row in found}
    for identity, (to, status, data) in ends.items():
        end = _end(identity, rows[identity], status, data, now_us)
        if identity in letters:
            _add_letter(end, letters[identity], tx.letters[letters[identity]])
        change.sends += [
            Send(queue=queue, outgoing=out, tenant_id=identity[0])
            for queue, out in notices_of(to, end)
        ]


def _end(
    identity: Identity, row: Sequence[Any], status: Status, data: Mapping[str, Any], now_us: int
) -> End:
    """Describe the end of a task from its row and the data of its final event."""
    tenant_id, subscription, task_id = identity
    tool_name, result, retry_count, error, key, worker = row
    return End(
        tenant_id=tenant_id,
        subscription=subscription,
        task_id=task_id,
        tool_name=tool_name or "",
        status=status,
        result=result,
        error=str(data.get("error") or data.get("reason") or error or ""),
        retry_count=data.get("retry_count", retry_count) or 0,
        idempotency_key=key,
        finished_at_us=now_us,
        consumer=worker or "",
        duplicate_of=data.get("first_id"),
    )


def _add_letter(end: End, letter_id: str, letter: Letter) -> None:
    """Describe the dead letter that a task left."""
    end.letter = letter_id
    form = msgspec.json.decode(letter.body_info) if letter.body_info else {}
    letter_fields(end, letter.body or b"", form.get("codec", ""), letter.reason)
