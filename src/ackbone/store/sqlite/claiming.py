"""What holds for all items of one claim: its transaction, subscription, worker and times."""

from __future__ import annotations

import sqlite3

import msgspec

from ackbone.core.broker import Subscription
from ackbone.store.fleet import GRACE_S, LOOK_S, SURE_S, Choice, Fleet
from ackbone.store.stored import Ahead

from .quotas import SqliteQuotaBook

OFFERS = (
    "SELECT offers FROM workers WHERE offers IS NOT NULL"
    " AND (state IN ('alive', 'leaving') OR ended_at BETWEEN ? AND ?)"
)
"""After the clock was set back, an end in the future is no recent one."""


class Claiming(msgspec.Struct, frozen=True):
    """One claim operation in the writer thread."""

    conn: sqlite3.Connection
    sub: Subscription
    worker_id: int
    now_us: int
    expiry_us: int
    """What expires up to here is over; 0 while the clock is in doubt."""
    ahead: Ahead = Ahead(0)
    held: str = "store"
    """Who keeps the message once claimed: `store` (one file with the queue) or `broker`."""
    worker: str = ""
    """The worker's name."""
    governed: bool = False
    """Runs bring along what people answered about their messages."""
    book: SqliteQuotaBook | None = None
    """Where runs are counted, if there are quotas."""
    mine: frozenset[str] | None = None
    """The types that this worker has handlers for; None: all."""
    fleet: Fleet = msgspec.field(default_factory=Fleet)

    @property
    def choice(self) -> Choice:
        """What this worker claims of the messages that the store holds."""
        if self.mine is not None:
            self._look(LOOK_S)
        return self.fleet.choice(self.sub.name, self.mine)

    def is_handled(self, message_type: str) -> bool:
        """Has any living worker a handler for it?"""
        self._look(SURE_S)
        return self.fleet.handles(self.sub.name, message_type)

    def _look(self, old_s: float) -> None:
        """Read what the workers offer, if that was last done this long ago."""
        if self.fleet.age_s < old_s:
            return
        since = self.now_us - int(GRACE_S * 1e6)
        self.fleet.update(text for (text,) in self.conn.execute(OFFERS, (since, self.now_us)))
