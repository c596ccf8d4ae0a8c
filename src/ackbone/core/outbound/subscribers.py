"""Subscribers: places that get a notification for each event that they choose.

A notification is a delivery. The transaction that writes the event writes it, too, so there is one
if and only if the event was committed. It is sent like any other reply, with waits,
limits and a breaker.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase

import msgspec

from ackbone.core import events
from ackbone.core.errors import ConfigError
from ackbone.core.message import check_name

from .delivery import SCHEDULED, New, check_recipient

EVENT_NAMES = tuple(
    sorted(
        value
        for name, value in vars(events).items()
        if name.isupper() and isinstance(value, str) and not value.startswith("ledger.")
    )
)
"""The events that can be subscribed to. Events of the ledger itself belong to no tenant."""
OURS = "_subscribers"
"""The queue name in the rows and events of notifications. Their events cause no notifications, or
each would cause the next."""
_encode = msgspec.json.Encoder().encode


class Subscriber(msgspec.Struct, frozen=True, kw_only=True):
    """One place, and the events that it wants."""

    channel: str
    recipient: str
    events: tuple[str, ...]
    """Names of events or patterns such as `delivery.*`."""
    tenant_id: str | None = None
    """Only events of this tenant; None: of all."""
    as_json: bool = True
    """Send the event as JSON, as in the ledger; otherwise as a line for people."""


class Subscribers(dict[str, list[Subscriber]]):
    """The subscribers of one process, by the events that they want."""

    def __init__(self, subscribers: Sequence[Subscriber] = ()) -> None:
        """Raise ConfigError for invalid names, and for patterns that match no event."""
        for each in subscribers:
            self.add(each)

    def add(self, subscriber: Subscriber) -> None:
        check_name("channel", subscriber.channel)
        check_recipient(subscriber.recipient)
        wanted: set[str] = set()
        for pattern in subscriber.events:
            found = events_named(pattern)
            if not found:
                raise ConfigError([no_event(pattern)])
            wanted.update(found)
        for name in sorted(wanted):
            self.setdefault(name, []).append(subscriber)

    @property
    def channels(self) -> frozenset[str]:
        """The channels of the notifications. A worker must have them."""
        return frozenset(each.channel for found in self.values() for each in found)

    def notifications(self, entries: Sequence[events.Entry], now_us: int) -> list[New]:
        """Return the notifications that these events cause."""
        return [
            _notification(subscriber, entry, now_us)
            for entry in entries
            if entry[1] != OURS
            for subscriber in self.get(entry[3], ())
            if subscriber.tenant_id in (None, entry[0])
        ]


def events_named(pattern: str) -> list[str]:
    """Return the events that a pattern matches."""
    return [name for name in EVENT_NAMES if fnmatchcase(name, pattern)]


def no_event(pattern: str) -> str:
    """Return the error message for a pattern that matches no event."""
    near = difflib.get_close_matches(pattern, EVENT_NAMES, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    kinds = ", ".join(sorted({f"{name.partition('.')[0]}.*" for name in EVENT_NAMES}))
    return f"no event is called {pattern!r:.60}; {hint}there are {kinds}"


def _notification(subscriber: Subscriber, entry: events.Entry, now_us: int) -> New:
    tenant_id, _, task_id, _, _ = entry
    return New(
        id=str(uuid.uuid4()),
        tenant_id=tenant_id,
        channel=subscriber.channel,
        recipient=subscriber.recipient,
        content=_as_json(entry, now_us) if subscriber.as_json else _as_line(entry),
        conversation=task_id or None,  # events of one message are sent in their order
        priority=SCHEDULED,
        options={"raw": True} if subscriber.as_json else {},
    )


def _as_json(entry: events.Entry, now_us: int) -> str:
    tenant_id, subscription, task_id, kind, data = entry
    at = datetime.fromtimestamp(now_us / 1e6, UTC).isoformat(timespec="microseconds")
    about = {"tenant_id": tenant_id, "queue": subscription, "task_id": task_id}
    return _encode({"type": kind, "timestamp": at, "data": {**about, **data}}).decode()


def _as_line(entry: events.Entry) -> str:
    tenant_id, subscription, task_id, kind, data = entry
    about = [f"{name} {data[name]}" for name in ("delivery_id", "channel") if name in data]
    where = [f"message {task_id}"] if task_id else []
    queue = [f"queue {subscription}"] if subscription else []
    said = next((str(data[name]) for name in ("error", "reason") if data.get(name)), "")
    line = f"{kind}: {', '.join([*where, *queue, *about, f'tenant {tenant_id}'])}"
    return f"{line}: {said}" if said else line
