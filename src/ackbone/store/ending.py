"""The final event of a message, as both stores keep it."""

from __future__ import annotations

import msgspec

from ackbone.core.endings import Ending
from ackbone.core.events import EVENT_OF_STATUS

_STATUS_OF_EVENT = {event: status for status, event in EVENT_OF_STATUS.items()}
FINAL_EVENTS = tuple(_STATUS_OF_EVENT)
_decode = msgspec.json.Decoder().decode


def ending(event_type: str, data: str, history: str | None) -> Ending:
    """`history`: the failed attempts of its dead letter, if there is one. Tracebacks stay here."""
    attempts = _decode(history) if history else ()
    return Ending(
        status=_STATUS_OF_EVENT[event_type],
        data=_decode(data),
        history=[{k: v for k, v in each.items() if k != "traceback"} for each in attempts],
    )
