"""Quotas as values: what may be used in a window of time, and how a store is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from .message import Message

UNITS = ("runs", "llm_calls", "tokens", "cost")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be used up in one window; None: as much as there is."""

    runs: int | None = None
    llm_calls: int | None = None
    tokens: int | None = None
    cost: float | None = None


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for each tenant and window. Windows begin at multiples of their length, in UTC."""

    name: str
    window_s: float
    limits: Limits


QuotasOf = Callable[[Message, str, int], Sequence[Quota]]
"""The quotas of a message, its queue and its attempt. Pure: it is called in a store's thread."""
