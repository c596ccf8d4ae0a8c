"""Quotas: how much each tenant may use in a window of time, and how much it has used.

Windows begin at full multiples of their length in UTC: an hour at full hours, a day at midnight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(gt=0, le=1_000_000_000_000)]

UNITS = ("runs", "llm_calls", "tokens", "cost")
WAITS_FOR = "waits for quota "
"""Beginning of the reason of messages that wait for a quota's next window. The name follows."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one window, as a rule file has them. None: no limit."""

    runs: _Count | None = None
    llm_calls: _Count | None = None
    tokens: _Count | None = None
    cost: Annotated[float, Meta(gt=0, le=1_000_000_000_000)] | None = None


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for each tenant and window."""

    name: str
    window_s: float
    limits: Limits

    @property
    def window_us(self) -> int:
        return int(self.window_s * 1e6)


class QuotaUse(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's usage of one quota in its latest window."""

    tenant_id: str
    name: str
    window_start_us: int
    window_end_us: int
    runs: int
    llm_calls: int
    tokens: int
    cost: float
    waiting: int
    """Messages that wait for the next window."""


class QuotaRecords(Protocol):
    """Reading quota usage."""

    async def quota_use(self, *, tenant_id: str | None = None) -> Sequence[QuotaUse]: ...
