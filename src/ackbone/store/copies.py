"""A message that the broker lost while it held the only copy: what is kept of it and reported."""

from __future__ import annotations

from typing import NamedTuple

from ackbone.core import events
from ackbone.core.events import Entry
from ackbone.core.outcome import Status
from ackbone.store.letters import Letter
from ackbone.store.outcomes import final_data
from ackbone.store.stored import decode_history

REASON = "copy_lost"
ERROR = (
    "the broker has no copy of this message any more, and the store never had its body. Send it"
    " again under a new id. If a copy with this id still arrives, it completes this dead letter,"
    " which can then be replayed"
)


class Lost(NamedTuple):
    """A row that ended because its copy is gone, in the order of the columns that are read."""

    tenant_id: str
    subscription: str
    message_id: str
    queue: str
    event_name: str | None
    attempt: int
    crashes: int
    key: str | None
    history: str | None
    trace_id: str | None

    def failed(self) -> Entry:
        """The final event."""
        data = final_data(
            self.queue,
            self.tenant_id,
            self.message_id,
            self.event_name,
            self.trace_id,
            Status.FAILED,
        )
        data.update(reason=REASON, error=ERROR)
        return self.tenant_id, self.subscription, self.message_id, events.FAILED, data

    def letter(self) -> Letter:
        return Letter(
            tenant_id=self.tenant_id,
            subscription=self.subscription,
            message_id=self.message_id,
            queue=self.queue,
            event_name=self.event_name,
            reason=REASON,
            error=ERROR,
            retry_count=max(0, self.attempt - self.crashes),
            history=decode_history(self.history),
        )
