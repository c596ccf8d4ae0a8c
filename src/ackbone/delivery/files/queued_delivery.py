"""A delivery as its file holds it."""

from __future__ import annotations

import json
import time
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from ackbone.core.errors import InvalidMessage
from ackbone.core.outbound.delivery import DIRECT
from ackbone.delivery.backoff import compute_backoff_ms, spread_s


@dataclass
class QueuedDelivery:
    """A delivery in a folder. Every file has the first nine fields; the others are written only
    when they differ from their defaults."""

    id: str
    channel: str
    recipient: str
    content: str
    created_at: float
    retry_count: int = 0
    last_attempt_at: float = 0.0
    last_error: str = ""
    max_retries: int = 5
    priority: int = DIRECT
    not_before: float = 0.0
    """When the next attempt is due, if the service asked for a wait; 0: by the table of waits."""
    sending_since: float = 0.0
    """When the attempt in progress began. A file with this value at a start may have arrived: the
    sender was killed before the answer came."""
    resent: int = 0
    """Number of times it was sent again although it may have arrived before."""
    expires_at: float = 0.0
    """No attempt begins after this time; 0: it never expires."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other keys of the file. They are kept."""

    @property
    def short_id(self) -> str:
        """The name of the delivery in logs."""
        return self.id[:8]

    @property
    def conversation(self) -> tuple[str, str, int]:
        """Deliveries with the same recipient and priority are sent in their order."""
        return self.channel, self.recipient, self.priority

    def to_dict(self) -> dict[str, Any]:
        written = {
            name: value
            for place, (name, each) in enumerate(_FIELDS.items())
            if (value := getattr(self, name)) != each.default or place < _ALWAYS
        }
        return {**written, **self.extra}

    def to_bytes(self) -> bytes:
        """Return the delivery as the content of a file."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"the text of the reply is not valid Unicode: {error}") from None

    @staticmethod
    def from_dict(d: dict[str, Any]) -> QueuedDelivery:
        """Raise KeyError for a missing field, TypeError for a value of another type, ValueError
        for a number that is out of range."""
        if not isinstance(d, dict):
            raise TypeError("a delivery is a JSON object")
        known: dict[str, Any] = {
            name: d[name] for name, each in _FIELDS.items() if each.default is MISSING or name in d
        }
        for name, value in known.items():
            kind = _KINDS[_FIELDS[name].type]
            if isinstance(value, bool) or not isinstance(value, kind):
                expected = "a text" if kind is str else "a number"
                raise TypeError(f"{name} is {expected}, not {value!r:.60}")
            if kind is not str:
                _check_number(name, value)
        extra = {name: value for name, value in d.items() if name not in known}
        return QueuedDelivery(**known, extra=extra)


def is_ready_for_retry(delivery: QueuedDelivery) -> bool:
    """Return True if it has waited long enough, or never failed."""
    if delivery.retry_count == 0:
        return True
    waited_ms = (time.time() - delivery.last_attempt_at) * 1000
    return waited_ms >= compute_backoff_ms(delivery.retry_count)


def due_at(delivery: QueuedDelivery, *, scale: float = 1.0) -> float:
    """Return when it is tried next (seconds since 1970). `scale` multiplies the waits of the
    table."""
    if delivery.not_before > 0 or delivery.retry_count <= 0:
        return delivery.not_before
    return delivery.last_attempt_at + spread_s(delivery.id, delivery.retry_count, scale)


def _check_number(name: str, value: float) -> None:
    """Raise ValueError for a number that is too large or not finite, which `json` accepts."""
    if not -_LARGEST < value < _LARGEST:
        raise ValueError(f"{name} is a number within reason, not {value!s:.60}")


_LARGEST = 10**15
_ALWAYS = 9
"""Number of fields that every file has."""
_FIELDS = {each.name: each for each in fields(QueuedDelivery) if each.name != "extra"}
_KINDS: dict[Any, Any] = {"str": str, "int": int, "float": (int, float)}
