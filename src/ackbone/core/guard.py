"""The guard port: governance decides before a run whether it may happen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

EXPIRES_S = 86_400.0
"""How long a question waits for its answer by default, in seconds."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A question to a person: may this message run?"""

    rule: str
    """Name of the rule that asks. The answer holds only for this rule and this payload."""
    expires_s: float = EXPIRES_S
    """After this many seconds, no answer means no."""
    four_eyes: bool = False
    """Two different people must approve."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The guard's answer."""

    allowed: bool
    reason: str = ""
    policies: tuple[str, ...] = ()
    ask: Ask | None = None
    """Park the message and ask a person."""


Guard = Callable[[dict[str, Any]], Awaitable[Decision]]
"""Called with {source, queue, message_id, tenant_id, type, channel, user, priority, payload,
attempt, approved}. An error never means allow."""


@runtime_checkable
class PromptGuard(Protocol):
    """A guard that needs no time limit: it answers at once, without waiting for anything."""

    def decision(self, context: Mapping[str, Any]) -> Decision: ...
