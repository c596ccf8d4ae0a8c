"""What holds for all messages of one claim: transaction, subscription, worker and times."""

from __future__ import annotations

import msgspec

from ackbone.core.broker import Subscription
from ackbone.core.store import Company, Worker

from .crash import crashes_of
from .fleet import LOOK_S, SURE_S, Choice, Fleet
from .quota_book import QuotaBook
from .tasks import Ahead
from .unit import NOTHING_EXPIRES, Change, Tx


class Claiming(msgspec.Struct, frozen=True, kw_only=True):
    """One claim operation."""

    tx: Tx
    change: Change
    sub: Subscription
    worker: Worker
    mine: frozenset[str] | None
    """The types that this worker has handlers for; None: all."""
    fleet: Fleet
    expiry: bool
    """False while the clock is in doubt: nothing expires."""
    ahead: Ahead
    held: str = "store"
    """Who keeps a message that runs: `store` (queue and store in one database) or `broker`."""
    governed: bool = False
    """Runs bring along what people answered about their messages."""
    book: QuotaBook | None = None
    """Where runs are counted, if there are quotas."""
    isolates: bool = True
    """Messages that crashed their workers run in child processes."""

    @property
    def most_crashes(self) -> int:
        """Messages with more crashes than this do not run among others."""
        return crashes_of(Company.ANY, isolates=self.isolates)[1]

    def over_us(self, now_us: int) -> int:
        """Messages that expire up to this moment are expired."""
        return now_us if self.expiry else NOTHING_EXPIRES

    def handles(self, message_type: str) -> bool:
        """True if this worker has a handler for the type."""
        return self.mine is None or message_type in self.mine

    async def choice(self) -> Choice:
        """Which messages that the store holds this worker claims."""
        if self.mine is not None:
            await self._read_offers(LOOK_S)
        return self.fleet.choice(self.sub.name, self.mine)

    async def is_handled(self, message_type: str) -> bool:
        """True if any living worker has a handler for the type."""
        await self._read_offers(SURE_S)
        return self.fleet.handles(self.sub.name, message_type)

    async def _read_offers(self, old_s: float) -> None:
        """Read what the workers offer, unless that was done less than `old_s` seconds ago."""
        if self.fleet.age_s >= old_s:
            self.fleet.update(await self.tx.tasks.offers())
