"""Replies on their way out, and the port that carries them: pending, sending, sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from .store import Worker


class Outbound(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that a channel has to deliver. Its id is the same however often it is tried."""

    id: str
    tenant_id: str
    channel: str
    recipient: str
    content: str
    conversation: str | None = None
    task_id: str | None = None


class Deliveries(Protocol):
    """Replies of one store. What is taken is this worker's until it is sent or given back."""

    async def waiting(self, channel: str) -> bool:
        """Is there anything to take?"""
        ...

    async def take(self, channel: str, *, limit: int, worker: Worker) -> Sequence[Outbound]:
        """The oldest pending ones, now `sending`."""
        ...

    async def sent(self, ids: Sequence[str], *, worker: Worker) -> None: ...

    async def give_back(self, ids: Sequence[str], *, worker: Worker, error: str) -> None:
        """They could not be sent: pending again."""
        ...

    async def recover(self, channel: str, *, worker: Worker) -> int:
        """What dead workers were sending is pending again: sent or not, nobody can say."""
        ...

    def subscribe(self) -> asyncio.Event:
        """Set whenever there may be a new one. Give it back with `unsubscribe`."""
        ...

    def unsubscribe(self, event: asyncio.Event) -> None: ...
