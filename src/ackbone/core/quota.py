"""Quotas as values: what may be used in a window of time, and what of it is used up.

A window begins at a multiple of its length, in UTC: an hour at full hours, a day at midnight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

UNITS = ("runs", "llm_calls", "tokens", "cost")
WAITS_FOR = "waits for quota "
"""How the reason of a message begins that waits for a quota's next window; the name follows."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be used up in one window; None: as much as there is."""

    runs: int | None = None
    llm_calls: int | None = None
    tokens: int | None = None
    cost: float | None = None


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for each tenant and window."""

    name: str
    window_s: float
    limits: Limits

    @property
    def window_us(self) -> int:
        return int(self.window_s * 1e6)


class QuotaUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant used of a quota in its last window."""

    tenant_id: str
    name: str
    window_start_us: int
    window_end_us: int
    runs: int
    llm_calls: int
    tokens: int
    cost: float
    waiting: int
    """Messages that wait for its next window."""


class QuotaRecords(Protocol):
    """Looking."""

    async def quota_use(self, *, tenant_id: str | None = None) -> Sequence[QuotaUse]: ...
