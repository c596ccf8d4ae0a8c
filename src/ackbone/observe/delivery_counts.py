"""Counts of replies in one process, by channel, taken from the ledger's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ackbone.core import events

REPLIES = "delivery_replies_total"
RETRIES = "delivery_retries_total"
WAITS = "delivery_waits_total"
RESENT = "delivery_resent_total"

HELP = {
    REPLIES: "Replies that ended, by how they ended",
    RETRIES: "Attempts to send a reply that failed and are tried again",
    WAITS: "Replies put off at no cost: their channel asked for patience, or their place was down",
    RESENT: "Replies that were sent again although they may have arrived",
}
_STATUS_OF = {
    events.DELIVERY_SENT: "sent",
    events.DELIVERY_FAILED: "failed",
    events.DELIVERY_UNKNOWN: "unknown",
    events.DELIVERY_DISCARDED: "discarded",
}
STATUSES = tuple(_STATUS_OF.values())
COUNTED = frozenset({*_STATUS_OF, events.DELIVERY_WAITING, events.DELIVERY_RESENT})
Grew = Callable[[str, str, str, str], None]


class DeliveryCounts:
    """A listener of the store's events."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        """Counts by metric, channel and status. The status is empty for metrics without one."""
        self._channels: dict[str, None] = {}

    def hear(self, entries: Sequence[events.Entry], grew: Grew) -> None:
        """Count events. `grew` is called for each with tenant, metric, channel and status."""
        for tenant_id, _subscription, _task, kind, data in entries:
            if kind not in COUNTED:
                continue
            channel, status = data["channel"], _STATUS_OF.get(kind, "")
            self._channels[channel] = None
            if status:
                name = REPLIES
            elif kind == events.DELIVERY_RESENT:
                name = RESENT
            else:
                name = RETRIES if data["costs"] else WAITS
            self._counts[name, channel, status] += 1
            grew(tenant_id, name, channel, status)

    def values(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield every value: name, labels, number."""
        for channel in list(self._channels):
            for status in STATUSES:
                number = self._counts[REPLIES, channel, status]
                yield REPLIES, {"channel": channel, "status": status}, number
            for name in (RETRIES, WAITS, RESENT):
                yield name, {"channel": channel}, self._counts[name, channel, ""]
