"""What a transaction does beside its rows: events, and what is to be looked at after its commit."""

from __future__ import annotations

import msgspec

from .keys import Key
from .lanes import Lane
from .ledger import Entry
from .tasks import Identity


class Change(msgspec.Struct):
    """Filled by one attempt of an operation."""

    entries: list[Entry] = msgspec.field(default_factory=list)
    keys: set[Key] = msgspec.field(default_factory=set)
    """Somebody may wait for these, or began to wait."""
    lanes: set[Lane] = msgspec.field(default_factory=set)
    """Their heads may have ended."""
    topics: set[str] = msgspec.field(default_factory=set)
    """Whom to wake."""
    told: set[Identity] = msgspec.field(default_factory=set)
    """Tasks of whose end others hear by another way."""
    again: set[Identity] = msgspec.field(default_factory=set)
    """Successes whose copy came back: nobody may have been told."""

    durable: bool = False
    """An answer takes a broker's copy away: synced, even where the operation asked for less."""

    def let_go(self, tenant_id: str, sub: str, key: str | None, lane: str | None) -> None:
        """What ended holds neither its key nor its conversation."""
        if key is not None:
            self.keys.add((tenant_id, sub, key))
        if lane is not None:
            self.lanes.add((tenant_id, sub, lane))
