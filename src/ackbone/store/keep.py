"""How long finished things are kept."""

from __future__ import annotations

import msgspec

DAY_US = 86_400_000_000


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Days that finished things are kept; None: for ever."""

    tasks_days: float | None = None
    metrics_days: float | None = None
    deliveries_days: float | None = None
    dead_letters_days: float | None = None
