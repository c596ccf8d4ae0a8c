"""The calls that the engine makes for every message: claim, take, finish."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from ackbone.core.broker import Subscription
from ackbone.core.store import (
    Answer,
    Candidate,
    Commit,
    Company,
    Decode,
    Finished,
    Taken,
    Verdict,
    Worker,
    lets_go,
)

from . import claims, dead_on_arrival, parked, taking
from .base import BaseStore
from .claiming import Claiming
from .commit import X
from .finish import finish
from .fleet import handled_by
from .keys import release_waiting
from .quota_book import QuotaBook
from .tasks import Ahead
from .unit import WORK, Change, Tx
from .unstorable import commit_in_halves, finish_in_halves

T = TypeVar("T")
log = logging.getLogger("ackbone.store")


class ClaimStore(BaseStore[X]):
    """The store as the engine sees it. A dialect adds its connections, clocks and leases."""

    @abstractmethod
    def _ahead(self) -> Ahead:
        """Return how far the store's clock is ahead of this machine's clocks."""

    def _claim_is_answered(self, sub: Subscription, batch: Sequence[Candidate] | None) -> None:
        """The answer to a claim was committed. None: a claim of messages that the store holds."""

    # -- claim ------------------------------------------------------------------------------------

    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker, adopt: bool = False
    ) -> Sequence[Verdict]:
        """One transaction for the batch. A message that no row can hold ends as `unstorable`."""
        if not batch:
            return []

        async def admit(some: Sequence[Candidate]) -> Sequence[Verdict]:
            async def op(tx: Tx, change: Change) -> list[Verdict]:
                held = "store" if adopt else "broker"
                claim = self._claiming(tx, change, sub, worker, held=held)
                verdicts = await claims.admit(claim, some)
                # A lost claim of runs alone only runs again: the broker still has the messages.
                change.durable = adopt or lets_go(verdicts)
                return verdicts

            verdicts = await self.write(op, worker_id=worker.worker_id, durable=False)
            self._claim_is_answered(sub, some)
            return verdicts

        async def unstorable(candidate: Candidate, error: Exception) -> Verdict:
            log.error("a message of %s cannot be stored: %s", sub.queue, error)

            async def op(tx: Tx, change: Change) -> None:
                claim = self._claiming(tx, change, sub, worker)
                await dead_on_arrival.unstorable(claim, candidate, error)

            await self.write(op, worker_id=worker.worker_id)
            return Verdict(answer=Answer.DEAD, delivery=candidate.delivery)

        return await commit_in_halves(batch, admit, unstorable)

    async def take(self, sub: Subscription, decode: Decode, *, limit: int, worker: Worker) -> Taken:
        async def op(tx: Tx, change: Change) -> Taken:
            return await taking.take(self._claiming(tx, change, sub, worker), decode, limit)

        # Not synced, whatever it answers: a power cut that takes a verdict back puts the message
        # back into the queue, because both are the same commit.
        return await self.write(op, worker_id=worker.worker_id, durable=False)

    async def claim_ready(
        self, sub: Subscription, *, limit: int, worker: Worker, company: Company = Company.ANY
    ) -> Sequence[Verdict]:
        async def op(tx: Tx, change: Change) -> list[Verdict]:
            claim = self._claiming(tx, change, sub, worker)
            return await claims.claim_ready(claim, limit, company)

        # Not synced, whatever it answers: the message is in the row that it was in before.
        verdicts = await self.write(op, worker_id=worker.worker_id, durable=False)
        self._claim_is_answered(sub, None)
        return verdicts

    async def adopt_in_order(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker
    ) -> Sequence[Verdict] | None:
        async def op(tx: Tx, change: Change) -> list[Verdict] | None:
            if not await tx.lanes.own_source(sub.name, worker.worker_id):
                return None
            if not batch:  # only asked whether this worker is the one that fetches
                return []
            change.topics.add(WORK)
            return await claims.adopt_in_order(self._claiming(tx, change, sub, worker), batch)

        return await self.write(op, worker_id=worker.worker_id, durable=bool(batch))

    def _claiming(
        self, tx: Tx, change: Change, sub: Subscription, worker: Worker, *, held: str = "store"
    ) -> Claiming:
        return Claiming(
            tx=tx,
            change=change,
            sub=sub,
            worker=worker,
            mine=handled_by(worker, sub.name),
            fleet=self._fleet,
            expiry=not self.expiry_paused,
            ahead=self._ahead(),
            held=held,
            governed=self.governed,
            book=None if self.quotas_of is None else QuotaBook(tx, self.quotas_of),
            isolates=self._isolates,
        )

    # -- finish -----------------------------------------------------------------------------------

    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        """One transaction for the batch. A run that no row can hold ends as `unstorable`."""

        async def finish_some(some: Sequence[Finished]) -> Sequence[Commit]:
            return await self.write(
                lambda tx, change: finish(tx, change, some), worker_id=worker.worker_id
            )

        return await finish_in_halves(batch, finish_some)

    async def resolve(self, *, worker: Worker) -> int:
        """A safety net: a key or a conversation that ends is looked at by the write that ends it.
        Messages that were parked for an effect which turned out to be done go on as well."""
        sql = self.sql
        if await self.read(sql.operations.wait_for_effect):
            await self.write(parked.resume_for_effect, worker_id=worker.worker_id)
        waiting = await self.read(sql.claims.unresolved)
        stuck = {(t, s, lane) for t, s, lane in await self.read(sql.claims.stuck)}
        if not waiting and not stuck:
            return 0
        return await self.write(
            lambda tx, change: release_waiting(tx, change, None if waiting else (), stuck),
            worker_id=worker.worker_id,
        )
