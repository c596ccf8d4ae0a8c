"""The seven steps of a message: receive, decode, claim, guard, run, finish, settle.

This is all that happens to a message in a worker, in order. Three loops decide when, and for how
many messages at a time, and repeat a step while the store or the broker is unavailable:

    fetcher.py    when slots are free     1 receive, 2 decode, 3 claim     for a batch
    executor.py   for each granted run    4 guard, 5 run                   in a task of its own
    settler.py    when runs have ended    6 finish, 7 settle               for a batch

A broker outside the store's database keeps its copy of a message until step 7, unless the store
adopts the message (takes it over whole) in step 3. Where queue and store are one database, `take`
does steps 1 to 3 in one transaction, and step 7 has nothing to do. `flow.py` hands messages from
one loop to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ackbone.core.broker import Delivery, Settlement, Subscription
from ackbone.core.errors import BrokerError
from ackbone.core.outcome import Outcome
from ackbone.core.store import (
    Answer,
    Candidate,
    Commit,
    Company,
    Finished,
    Taken,
    Verdict,
    Worker,
    opened_parts,
)

from .decoder import decoder
from .guard import AskGuard
from .handlers import outcome_of
from .outages import Outages, broker_side
from .sources import Sources
from .wiring import Ports

if TYPE_CHECKING:
    from .executor import Active

T = TypeVar("T")

RECEIVE_WAIT_S = 1.0
"""How long one `receive` waits for the first message."""
LAST_ANSWER_S = 2.0
"""How long a fetcher that is stopped waits for the answer to its last claim."""


class Steps:
    """The steps of one worker, for all its subscriptions."""

    def __init__(
        self,
        ports: Ports,
        outages: Outages,
        *,
        guard: AskGuard | None = None,
        max_bytes: int | None = None,
        room_of: Callable[[str], int] = lambda subscription: 100,
    ) -> None:
        self.store = ports.store
        self.sources = Sources(ports.broker_of, room_of, outages)
        self.outages = outages
        self.results_on_ack = ports.results_on_ack
        self.worker = Worker(worker_id=0)
        """The registration that claims and finishes. After a lost lease it is another one."""
        self._guard = guard
        self._max_bytes = max_bytes

    # -- steps 1 to 3, a broker with a life of its own --------------------------------------------

    async def receive(self, sub: Subscription, limit: int) -> Sequence[Delivery]:
        """Step 1. Read up to `limit` copies. The broker gives them to no other worker meanwhile."""
        source = await self.sources.of(sub)
        return await source.receive(limit=limit, wait=RECEIVE_WAIT_S)

    def decode(self, sub: Subscription, deliveries: Sequence[Delivery]) -> list[Candidate]:
        """Step 2. Bytes and headers become messages. A copy that cannot be read becomes a candidate
        with an error, and step 3 ends it as a dead letter."""
        decode = decoder(sub, max_bytes=self._max_bytes)
        return [decode(delivery) for delivery in deliveries]

    async def claim(self, sub: Subscription, candidates: Sequence[Candidate]) -> Sequence[Verdict]:
        """Step 3. Ask the store, which alone decides, which of these messages run here and now.

        RUN grants a run: steps 4 to 6 follow, and the broker keeps its copy until step 7. With
        LEAVE the copy goes back to the broker. After every other verdict (duplicate, parked, …) the
        store holds the message or its end, and the fetcher settles the copy at once.

        Two kinds of messages are adopted, so their copies are settled before they run: those
        without any id (`minted`), because a second copy would not be recognized, and in an ordered
        subscription those with an ordering key, in the broker's order. `opened`: parts that begin.
        """
        others, verdicts = candidates, list[Verdict]()
        if sub.ordered:
            keyed = [c for c in candidates if c.message and c.message.ordering_key]
            others = [c for c in candidates if not (c.message and c.message.ordering_key)]
            opened = opened_parts(candidates)  # also by messages that have no key
            if keyed or opened:
                adopted = await self.store.adopt_in_order(
                    sub, keyed, worker=self.worker, opened=opened
                )
                verdicts += adopted or [
                    Verdict(answer=Answer.LEAVE, delivery=c.delivery) for c in keyed
                ]
        minted = [each for each in others if each.minted]
        if minted:  # another copy would get another id and run
            others = [each for each in others if not each.minted]
            asked = self.store.claim(sub, minted, worker=self.worker, adopt=True)
            verdicts += await _answer(asked)
        if others:
            verdicts += await _answer(self.store.claim(sub, others, worker=self.worker))
        return verdicts

    # -- steps 1 to 3, queue and store in one database --------------------------------------------

    async def take(self, sub: Subscription, limit: int) -> Taken:
        """Steps 1, 2 and 3 in one transaction of the store.

        It deletes messages from their queue and writes their task rows. A crash leaves both or
        neither, so no message is ever lost or there twice, and step 7 has no copy to settle. The
        store calls the decoder in the middle of the transaction, because a message's id and keys
        decide its claim. The same call claims messages that the store holds (see `claim_held`).
        """
        store: Any = self.store  # a store with queues in it has `take` (core.store.Fused)
        return await _answer(
            store.take(
                sub, decoder(sub, max_bytes=self._max_bytes), limit=limit, worker=self.worker
            )
        )

    # -- step 3 alone, messages that the store holds ----------------------------------------------

    async def claim_held(
        self, sub: Subscription, limit: int, company: Company = Company.ANY
    ) -> Sequence[Verdict]:
        """Claim messages that passed steps 1 and 2 earlier and are due now: retries, resumed and
        adopted messages, the next one of a conversation. `company`: who may run beside them."""
        return await _answer(
            self.store.claim_ready(sub, limit=limit, worker=self.worker, company=company)
        )

    # -- steps 4 and 5, one message ---------------------------------------------------------------

    async def guard_and_run(
        self, active: Active, call: Callable[[Active], Awaitable[Any]]
    ) -> Outcome:
        """Step 4: ask the rules and the guard function. Anything but a clear yes ends the attempt
        here. Step 5: `call` the handler, with its middleware and its time limit around it."""
        if self._guard is not None:
            stopped = await self._guard(active.run)
            if stopped is not None:
                return stopped
        return outcome_of(await call(active))

    # -- steps 6 and 7, everything that ended meanwhile -------------------------------------------

    async def finish(self, ended: Sequence[Finished]) -> Sequence[Commit]:
        """Step 6. One transaction: outcomes, results by key, replies, follow-ups, ledger events.

        A run that lost its claim is refused (FENCED), and nothing of it is written.
        """
        return await self.store.finish(ended, worker=self.worker)

    async def settle(self, sub: Subscription, batch: Sequence[Settlement]) -> None:
        """Step 7. The store holds the outcome: let the broker drop, release or reject its copies.

        An error here is harmless. The copy comes again, and step 3 recognizes it.
        """
        try:
            await self.sources.settle(sub, batch)
        except BrokerError as error:
            caller, side = f"settling messages of {sub.queue}", broker_side(sub.broker)
            self.outages.failed(caller, error, asks_again=False, broker=side)


async def _answer(claim: Coroutine[Any, Any, T]) -> T:
    """Return the answer of a claim, even if the caller is cancelled meanwhile. The cancellation
    arrives at the caller's next await instead.

    The store carries out the claim even if the caller is gone, and a granted run must not be
    forgotten. Grants that nobody received are handed back when the worker signs off.
    """
    asked = asyncio.ensure_future(claim)
    try:
        return await asyncio.shield(asked)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        await asyncio.wait({asked}, timeout=LAST_ANSWER_S)
        if caller is None or not asked.done() or asked.cancelled():
            asked.cancel()
            raise
        caller.cancel()
        return asked.result()
