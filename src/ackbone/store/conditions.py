"""Conditions on tasks, in the words that the partial indexes have."""

from __future__ import annotations

from ackbone.core.events import EVENT_OF_STATUS
from ackbone.core.outcome import FINAL, Status

TASK = "tenant_id = $1 AND subscription = $2 AND message_id = $3"
"""One task, by the first three parameters, as `ackbone.store.sql` writes them."""
ENDED = tuple(status.value for status in Status if status in FINAL)
FINAL_WORDS = "('" + "', '".join(ENDED) + "')"
STATUS_OF_EVENT = {event: status for status, event in EVENT_OF_STATUS.items()}
"""The final events."""
FINAL_EVENTS = "('" + "', '".join(STATUS_OF_EVENT) + "')"


def none_of(*words: str, column: str = "status") -> str:
    """A condition in the words of the partial indexes, which are used only with the same words."""
    return " AND ".join(f"{column} <> '{word}'" for word in words)


UNENDED = none_of(*ENDED)
"""The task has not ended."""
UNCOMMON = none_of("running", "succeeded", "duplicate")
"""The task neither runs nor ended well: the few rows that a person may look for."""


KNOWN_EFFECT = (
    # `EffectUnknown` names the effect that the message waits for in its reason.
    "q.status = 'parked' AND q.parked_kind = 'effect_unknown' AND EXISTS (SELECT 1 FROM effects e"
    " WHERE e.tenant_id = q.tenant_id AND e.subscription = q.subscription"
    " AND e.message_id = q.message_id AND e.state = 'done' AND"
    " substr(q.error_message, 1, length(e.name) + 9)"
    " IN ('effect ''' || e.name || '''', 'effect \"' || e.name || '\"'))"
)
"""A message that is parked for an effect whose result was recorded later, by a worker that was
suspended meanwhile."""
