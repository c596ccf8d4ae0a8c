"""Runs that a claim granted whose commit got no answer.

The commit may have been made. The next call that asks for the same message is then answered with
the run as it was granted, instead of finding it running elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ackbone.core.broker import Subscription
from ackbone.core.message import Message
from ackbone.core.outcome import Status
from ackbone.core.store import Answer, Candidate, Run, Token, Verdict
from ackbone.pgserver import arrays
from ackbone.store.outcomes import identity_of
from ackbone.store.tasks import Existing
from ackbone.store.unit import Identity

from .task_rows import LOCK

if TYPE_CHECKING:
    from ackbone.store.claiming import Claiming

    from .database import Tx


class UnsureRuns:
    """The runs of this process of which nobody knows whether they were committed."""

    def __init__(self, end_lost: Callable[[], Awaitable[bool]]) -> None:
        """`end_lost` ends lost connections; it returns False if there is none."""
        self._runs: dict[Identity, Run] = {}
        self.end_lost = end_lost

    def add(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            run = verdict.run
            if run is not None and verdict.answer is Answer.RUN:
                self._runs[identity_of(run)] = run

    def answered(self, sub: Subscription, candidates: Sequence[Candidate] | None) -> None:
        """The answer to a claim was committed: nothing about these messages is unsure any more.

        None: the answer of `claim_ready`, which asks for all messages that the store holds.
        """
        if not self._runs:
            return
        asked = {c.message.id for c in candidates or () if c.message is not None}
        for identity, run in list(self._runs.items()):
            mine = run.delivery is None if candidates is None else identity[2] in asked
            if identity[1] == sub.name and mine:
                del self._runs[identity]

    def get(self, identity: Identity) -> Run | None:
        return self._runs.get(identity)

    def held_by_store(self, subscription: str) -> dict[tuple[str, str], Run]:
        """By tenant and message, the runs of messages that no broker holds."""
        return {
            (tenant_id, message_id): run
            for (tenant_id, sub, message_id), run in self._runs.items()
            if sub == subscription and run.delivery is None
        }


class PostgresGrantedRuns:
    """`GrantedRuns` in one transaction."""

    def __init__(self, tx: Tx, unsure: UnsureRuns) -> None:
        self._tx = tx
        self._unsure = unsure

    def keep(self, verdicts: Sequence[Verdict]) -> None:
        self._tx.if_unknown = lambda: self._unsure.add(verdicts)

    def of(self, claim: Claiming, message: Message, row: Existing) -> Run | None:
        run = self._unsure.get((message.tenant_id, claim.sub.name, message.id))
        if run is None or row.status != Status.RUNNING:
            return None
        same = (row.worker_id, row.epoch) == (run.token.worker_id, run.token.epoch)
        return run if same and run.token.worker_id == claim.worker.worker_id else None

    async def held_by_store(self, claim: Claiming) -> list[Run]:
        """Their rows are asked for by their names alone, and locked: a claim that is still being
        committed is waited for. By its status such a row would not be found yet, and never again.

        A row that `take` is writing cannot be seen and not be locked, so a lost connection that may
        be writing one is ended. If its commit was made, its runs are returned here. If not, their
        messages are in the queue. So none is lost, and none is granted twice.
        """
        asked = self._unsure.held_by_store(claim.sub.name)
        if not asked:
            return []
        mine = await self._mine(claim, asked)
        if len(mine) < len(asked) and await self._unsure.end_lost():
            mine = await self._mine(claim, asked)
        return mine

    async def _mine(self, claim: Claiming, asked: Mapping[tuple[str, str], Run]) -> list[Run]:
        """Those whose rows bear their token."""
        found = await self._tx.rows(LOCK, claim.sub.name, *arrays.columns(sorted(asked)))
        tokens = {
            (tenant_id, message_id): Token(worker_id, epoch)
            for tenant_id, message_id, worker_id, epoch, status in found
            if status == Status.RUNNING and worker_id == claim.worker.worker_id
        }
        return [asked[pair] for pair, token in tokens.items() if token == asked[pair].token]
