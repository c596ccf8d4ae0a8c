"""What the engine tells whoever counts: per batch, so that a message costs next to nothing.

How messages end is not told here but read from the ledger's events (`Claims.on_events`), the one
place that knows of every end, whoever brought it about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from .message import DEFAULT_TENANT
from .store import Finished


class Meter(Protocol):
    """Counts of one process."""

    def ran(self, batch: Sequence[Finished]) -> None:
        """Attempts whose end is committed."""
        ...

    def recognized(self, queue: str, copies: int) -> None:
        """Further copies of messages that the store knew: acknowledged, not run."""
        ...

    def dedup_unavailable(self, queue: str, messages: int) -> None:
        """Messages that had to wait because nobody could say whether they ran before."""
        ...


class MetricRow(msgspec.Struct, frozen=True, kw_only=True):
    """One value of one queue, as it is kept in `queue_metrics`."""

    tenant_id: str = DEFAULT_TENANT
    queue: str
    name: str
    value: float
    tags: Mapping[str, str | int] = {}


class MetricRows(Protocol):
    """Where exported counts are kept."""

    async def add(self, batch: Sequence[MetricRow]) -> None: ...
