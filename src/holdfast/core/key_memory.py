"""Dedup keys outside of the store, for programs that share a key and no store.

The store's own keys commit together with the outcome (P4, P5); no memory beside it can. What one is
good for: workers of others see which keys are done, and ours see theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class SharedKey(msgspec.Struct, frozen=True):
    """A key, and the message that asks for it."""

    tenant_id: str
    subscription: str
    key: str
    message_id: str
    window_s: float
    """How long it is remembered, from now on."""


class KeyHolder(msgspec.Struct, frozen=True):
    """Whose a key is."""

    message_id: str | None
    """None: whoever recorded the result did not say."""
    result: bytes | None
    """As JSON; None: there is none yet."""


class KeyMemory(Protocol):
    """Batches in, one answer per key out. Raises HoldfastError if it cannot be asked."""

    async def look(self, keys: Sequence[SharedKey]) -> Sequence[KeyHolder | None]:
        """Whose they are; None: nobody's."""
        ...

    async def take(self, keys: Sequence[SharedKey]) -> Sequence[KeyHolder]:
        """Whose they are now: a key that was nobody's is its message's, for the window."""
        ...

    async def keep(self, done: Sequence[tuple[SharedKey, bytes]]) -> None:
        """Results, for the window."""
        ...

    async def free(self, keys: Sequence[SharedKey]) -> None:
        """Forget those that are still their message's, result and all."""
        ...

    async def close(self) -> None: ...
