"""The port for counting what the engine does. Calls are per batch, which keeps them cheap.

The ends of messages are not counted here. They are read from the ledger's events
(`Claims.on_events`), which contain every end, also those that operators cause.
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
        """Count attempts whose outcome is committed."""

    def recognized(self, queue: str, copies: int) -> None:
        """Count copies of messages that the store already knew: acknowledged, not run."""

    def dedup_unavailable(self, queue: str, messages: int) -> None:
        """Count messages that wait because the dedup store cannot be asked."""


class MetricRow(msgspec.Struct, frozen=True, kw_only=True):
    """One value of one queue: a row of `queue_metrics`."""

    tenant_id: str = DEFAULT_TENANT
    queue: str
    name: str
    value: float
    tags: Mapping[str, str | int] = {}


class MetricRows(Protocol):
    """Storage of exported metrics."""

    async def add(self, batch: Sequence[MetricRow]) -> None: ...
