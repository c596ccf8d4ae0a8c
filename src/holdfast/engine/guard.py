"""The guard port: governance decides before a run whether it may happen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard says."""

    allowed: bool
    reason: str = ""
    policies: tuple[str, ...] = ()


Guard = Callable[[dict[str, Any]], Awaitable[Decision]]
"""Called with {source, queue, message_id, tenant_id, type, attempt}. An error never means allow."""
