"""How messages ended, for those who must tell others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from .outcome import Status


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a message ended, from the store's final event."""

    status: Status
    data: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]] = ()
    """Failed attempts: attempt, at, error."""

    @property
    def reason(self) -> str:
        return str(self.data.get("error") or self.data.get("reason") or self.status)


Identity = tuple[str, str]
"""tenant_id, task_id"""
Endings = Callable[[str, Sequence[Identity]], Awaitable[Mapping[Identity, Ending]]]
"""Asks the store: the subscription and the messages; those that are final come back."""
