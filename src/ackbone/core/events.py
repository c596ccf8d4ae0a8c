"""Names of the ledger's events, and the event that observers get.

Each task has exactly one final event (P3). Observers are called after the commit. They cannot
change anything, and errors that they raise are only logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .outcome import Status

CREATED = "task.created"
CLAIMED = "task.claimed"
RETRIED = "task.retried"
LOST = "task.lost"
RECLAIMED = "task.reclaimed"
PARKED = "task.parked"
RESUMED = "task.resumed"
RELEASED = "task.released"
DLQ = "task.dlq"
HEARTBEAT = "task.heartbeat"
CANCEL_ASKED = "task.cancel_asked"
SUCCEEDED = "task.succeeded"
FAILED = "task.failed"
REJECTED = "task.rejected"
EXPIRED = "task.expired"
DISCARDED = "task.discarded"
DUPLICATE = "task.duplicate"
DLQ_REPLAYED = "dlq.replayed"
DLQ_EDITED = "dlq.edited"
DLQ_DISCARDED = "dlq.discarded"
EFFECT_BEGUN = "effect.begun"
EFFECT_DONE = "effect.done"
EFFECT_CLEARED = "effect.cleared"
APPROVAL_REQUESTED = "approval.requested"
APPROVAL_FIRST = "approval.first"
APPROVAL_APPROVED = "approval.approved"
APPROVAL_REJECTED = "approval.rejected"
APPROVAL_EXPIRED = "approval.expired"
DELIVERY_CREATED = "delivery.created"
DELIVERY_SENT = "delivery.sent"
DELIVERY_PART = "delivery.part"
DELIVERY_WAITING = "delivery.waiting"
DELIVERY_RESENT = "delivery.resent"
DELIVERY_RECLAIMED = "delivery.reclaimed"
DELIVERY_FAILED = "delivery.failed"
DELIVERY_UNKNOWN = "delivery.unknown"
DELIVERY_RETRIED = "delivery.retried"
DELIVERY_EDITED = "delivery.edited"
DELIVERY_DISCARDED = "delivery.discarded"
DELIVERY_PAUSED = "delivery.paused"
DELIVERY_RESUMED = "delivery.resumed"
QUEUE_PAUSED = "queue.paused"
QUEUE_RESUMED = "queue.resumed"
ANCHOR = "ledger.anchor"
PRUNED = "ledger.pruned"
RECOVERED = "ledger.recovered"

EVENT_OF_STATUS = {
    Status.SUCCEEDED: SUCCEEDED,
    Status.FAILED: FAILED,
    Status.REJECTED: REJECTED,
    Status.EXPIRED: EXPIRED,
    Status.DISCARDED: DISCARDED,
    Status.DUPLICATE: DUPLICATE,
}
FINAL_EVENTS = frozenset(EVENT_OF_STATUS.values())

Entry = tuple[str, str, str, str, Mapping[str, Any]]
"""A new entry of the ledger: tenant_id, subscription, task_id, event type, data."""
Listener = Callable[[Sequence[Entry]], None]
"""Called with the new entries after the commit."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a task, after its commit."""

    type: str
    tenant_id: str
    subscription: str
    task_id: str
    data: Mapping[str, Any] = {}
    """The data of the ledger entry."""


Observer = Callable[[Event], None]
