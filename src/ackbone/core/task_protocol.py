"""The parts of the task protocol that the broker port does not have.

Programs that know only Redis take part in the protocol: they write and read entries that consist of
fields, expect one result for each task, and read streams without a group. `TaskBroker` is the role
of a broker that such programs reach. Other brokers carry the same messages as bodies and headers.

Beside this module: `core/codecs/task.py` (the wire form), `core/notices.py` (results and copies of
dead letters), `store/task_protocol.py` (claims), `engine/task_heartbeats.py` and
`engine/foreign_dead_letters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from .broker import Broker, Delivery, Outgoing, Settlement, Source, Subscription

FLAT = "x-ackbone-flat"
"""Header: the body is a JSON object whose values are texts. A `TaskBroker` writes one field for
each."""
FLAT_HEADERS: Mapping[str, str] = {FLAT: "1"}
ONCE = "x-ackbone-once"
"""Header: a mark. A `TaskBroker` publishes only one of all messages to a queue with the same mark.
Other brokers publish every one."""


class TaskProtocol(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue of tasks has in addition to other queues (`Subscription.protocol`)."""

    max_retries: int = 3
    """Upper bound for the `retry_count` that a task brings from another worker."""


class FlatOutgoing(Outgoing, frozen=True, kw_only=True):
    """A FLAT message whose fields the sender has, so that the broker need not parse the body."""

    fields: Mapping[str, str]
    """The contents of the body. All values are valid Unicode."""


class FlatDelivery(Delivery, frozen=True, kw_only=True):
    """A FLAT message whose fields the broker has, so that the body need not be parsed."""

    fields: Mapping[str, str]
    """The contents of the body."""


class AckWithNotices(Settlement, frozen=True, kw_only=True):
    """An ACK with messages that are published before it, each once."""

    notices: Sequence[tuple[str, Outgoing]]
    """Pairs of a queue and a message. A message that has `fields` may have no body."""


@runtime_checkable
class TaskBroker(Broker, Protocol):
    """Optional role of a broker: programs that know nothing but its server take part in the task
    protocol.

    `publish` obeys the header `ONCE`, and writes the fields of FLAT messages. `settle` of its
    sources publishes the notices of each `AckWithNotices`, and leaves a copy unsettled whose
    notices were refused.
    """

    async def subscribe_beside(self, sub: Subscription, *, room: int) -> Source:
        """As `subscribe`, for a queue that other programs read without a group: acknowledged
        messages are not removed from it."""
        ...
