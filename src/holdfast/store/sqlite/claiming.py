"""What holds for all items of one claim: its transaction, subscription, worker and times."""

from __future__ import annotations

import sqlite3

import msgspec

from holdfast.core.broker import Subscription
from holdfast.store.stored import Ahead

from .quotas import SqliteQuotaBook


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
