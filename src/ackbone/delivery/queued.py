"""One reply that waits for its delivery, as its file tells it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ackbone.core.delivery import DIRECT
from ackbone.core.errors import InvalidMessage


@dataclass
class QueuedDelivery:
    """Nine fields that every file has; the others stand in it only when they say something."""

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
    """When the next attempt is due, if not by the table of waits: the other side asked for it."""
    sending_since: float = 0.0
    """An attempt is under way. Found at a start: a crash hid the answer, it may have arrived."""
    resent: int = 0
    """How often it was sent again although it may have arrived before."""
    expires_at: float = 0.0
    """No attempt begins after this time; 0: it never expires."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else somebody wrote into the file; it is kept."""

    @property
    def short_id(self) -> str:
        """How people name it."""
        return self.id[:8]

    @property
    def conversation(self) -> tuple[str, str, int]:
        """What is for one place, and as urgent, goes there in the order in which it was said."""
        return self.channel, self.recipient, self.priority

    def to_dict(self) -> dict[str, Any]:
        written: dict[str, Any] = {name: getattr(self, name) for name in _NINE}
        for name, usual in _RARE.items():
            value = getattr(self, name)
            if value != usual:
                written[name] = value
        return {**written, **self.extra}

    def to_bytes(self) -> bytes:
        """Its file."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"the text of the reply is not valid Unicode: {error}") from None

    @staticmethod
    def from_dict(d: dict[str, Any]) -> QueuedDelivery:
        """Raises KeyError for a field that is missing, TypeError for one of another kind,
        ValueError for a number that is none to reckon with."""
        if not isinstance(d, dict):
            raise TypeError("a delivery is a JSON object")
        known: dict[str, Any] = {name: d[name] for name in _REQUIRED}
        known |= {name: d[name] for name in (*_NINE, *_RARE) if name in d}
        for name, value in known.items():
            kind = _KINDS[name]
            if isinstance(value, bool) or not isinstance(value, kind):
                expected = "a text" if kind is str else "a number"
                raise TypeError(f"{name} is {expected}, not {value!r:.60}")
            if kind is not str:
                _check_number(name, value)
        extra = {name: value for name, value in d.items() if name not in known}
        return QueuedDelivery(**known, extra=extra)


def _check_number(name: str, value: float) -> None:
    """Raises ValueError for one that is not finite, which JSON's readers let pass, or too large."""
    if not -_LARGEST < value < _LARGEST:
        raise ValueError(f"{name} is a number within reason, not {value!s:.60}")


_LARGEST = 10**15
_REQUIRED = ("id", "channel", "recipient", "content", "created_at")
_NINE = (*_REQUIRED, "retry_count", "last_attempt_at", "last_error", "max_retries")
_RARE: dict[str, Any] = {
    "priority": DIRECT,
    "not_before": 0.0,
    "sending_since": 0.0,
    "resent": 0,
    "expires_at": 0.0,
}
_KINDS: dict[str, Any] = {
    "id": str,
    "channel": str,
    "recipient": str,
    "content": str,
    "created_at": (int, float),
    "retry_count": int,
    "last_attempt_at": (int, float),
    "last_error": str,
    "max_retries": int,
    "priority": int,
    "not_before": (int, float),
    "sending_since": (int, float),
    "resent": int,
    "expires_at": (int, float),
}
