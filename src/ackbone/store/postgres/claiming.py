"""What holds for all items of one claim: its transaction, subscription, worker and handlers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ackbone.core.broker import Subscription
from ackbone.core.store import QuotasOf, Run
from ackbone.store.fleet import GRACE_S, LOOK_S, SURE_S, Choice, Fleet
from ackbone.store.stored import Ahead
from ackbone.store.unit import Change

from .database import Tx
from .quotas import PostgresQuotaBook
from .roll import OFFERS


class Claiming(NamedTuple):
    """One claim operation."""

    tx: Tx
    change: Change
    sub: Subscription
    worker_id: int
    expiry: bool
    """False while the clock is in doubt: nothing expires."""
    ahead: Ahead
    worker: str
    """The worker's name."""
    governed: bool
    """Runs bring along what people answered about their messages."""
    quotas_of: QuotasOf | None
    """Under which quotas runs are counted, if there are any."""
    mine: frozenset[str] | None
    """The types that this worker has handlers for; None: all."""
    fleet: Fleet

    async def choice(self) -> Choice:
        """What this worker claims of the messages that the store holds."""
        if self.mine is not None:
            await self._look(LOOK_S)
        return self.fleet.choice(self.sub.name, self.mine)

    async def is_handled(self, message_type: str) -> bool:
        """Has any living worker a handler for it?"""
        await self._look(SURE_S)
        return self.fleet.handles(self.sub.name, message_type)

    async def _look(self, old_s: float) -> None:
        """Read what the workers offer, if that was last done this long ago."""
        if self.fleet.age_s < old_s:
            return
        found = await self.tx.rows(OFFERS, str(GRACE_S))
        self.fleet.update(text for (text,) in found)

    def is_mine(self, run: Run) -> bool:
        return self.mine is None or run.message.type in self.mine

    async def book(self, runs: Sequence[Run]) -> PostgresQuotaBook | None:
        """Where these runs are counted; None: nowhere."""
        if self.quotas_of is None:
            return None
        book = PostgresQuotaBook(self.tx, await self.tx.moment(), self.quotas_of)
        await book.open_for(runs)
        return book

    def is_over(self, expires_us: int | None, now_us: int) -> bool:
        return self.expiry and expires_us is not None and expires_us <= now_us
