"""Subscribers: places that are told of events, each time by a delivery of its own.

That delivery is written in the transaction that the event tells of: what happened is told, and what
was undone is not. From there on it is a reply like any other, with waits, limits and a breaker.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase

import msgspec

from . import events
from .delivery import SCHEDULED, New, check_recipient
from .errors import ConfigError
from .message import check_name

EVENT_NAMES = tuple(
    sorted(
        value
        for name, value in vars(events).items()
        if name.isupper() and isinstance(value, str) and not value.startswith("ledger.")
    )
)
"""All that can be subscribed to. What the ledger says of itself belongs to no tenant."""
OURS = "_subscribers"
"""Stands for a queue in the rows and events of such deliveries: nobody is told of those, or each
would be followed by the next."""
_encode = msgspec.json.Encoder().encode


class Subscriber(msgspec.Struct, frozen=True, kw_only=True):
    """One place, and what it wants to hear of."""

    channel: str
    recipient: str
    events: tuple[str, ...]
    """Names of events; `*` stands for anything: `delivery.*`."""
    tenant_id: str | None = None
    """Only of this one; None: of all."""
    as_json: bool = True
    """For programs: the event as it stands in the ledger. Else a line for people."""


class Subscribers:
    """All of one process, by the events that they want."""

    def __init__(self, subscribers: Sequence[Subscriber] = ()) -> None:
        """Raises ConfigError for names and patterns that can never be right."""
        self._by_event: dict[str, list[Subscriber]] = {}
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
            self._by_event.setdefault(name, []).append(subscriber)

    def __bool__(self) -> bool:
        return bool(self._by_event)

    @property
    def channels(self) -> frozenset[str]:
        """By which they are told: somebody has to carry for these."""
        return frozenset(each.channel for found in self._by_event.values() for each in found)

    def told_of(self, entries: Sequence[events.Entry], now_us: int) -> list[New]:
        """What these events make their subscribers hear."""
        return [
            _telling(subscriber, entry, now_us)
            for entry in entries
            if entry[1] != OURS
            for subscriber in self._by_event.get(entry[3], ())
            if subscriber.tenant_id in (None, entry[0])
        ]


def events_named(pattern: str) -> list[str]:
    """Those that a pattern stands for."""
    return [name for name in EVENT_NAMES if fnmatchcase(name, pattern)]


def no_event(pattern: str) -> str:
    """What to say of a pattern that stands for none."""
    near = difflib.get_close_matches(pattern, EVENT_NAMES, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    kinds = ", ".join(sorted({f"{name.partition('.')[0]}.*" for name in EVENT_NAMES}))
    return f"no event is called {pattern!r:.60}; {hint}there are {kinds}"


def _telling(subscriber: Subscriber, entry: events.Entry, now_us: int) -> New:
    tenant_id, _, task_id, _, _ = entry
    return New(
        id=str(uuid.uuid4()),
        tenant_id=tenant_id,
        channel=subscriber.channel,
        recipient=subscriber.recipient,
        content=_as_json(entry, now_us) if subscriber.as_json else _as_line(entry),
        conversation=task_id or None,  # what happens to one message is told in its order
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
