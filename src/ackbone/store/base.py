"""The store as the engine sees it, as far as both dialects are alike.

A dialect adds how it opens its database, its transaction (`ackbone.store.commit`), its leases, and
claims. Each method here is one transaction, or one look.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ackbone.core.broker import Subscription, Transactional
from ackbone.core.errors import StoreCorrupt
from ackbone.core.ids import new_id
from ackbone.core.outbound.subscribers import Subscribers
from ackbone.core.outcome import UNSTORABLE, Dead
from ackbone.core.store import (
    Answer,
    Candidate,
    Commit,
    Company,
    Decode,
    Finished,
    Offers,
    QuotasOf,
    Reclaimed,
    Send,
    Suspects,
    Taken,
    Verdict,
    Worker,
    lets_go,
)

from . import claims, dead_on_arrival, parked, workers
from .claiming import GRACE_US, LOOK_S, Claiming, Fleet, handled_by, offers_text
from .commit import NoticesOf, X, commit_in_halves
from .finish import finish
from .ledger import Chains
from .quota_book import QuotaBook
from .runs import RunWrites
from .sql import Statements
from .taking import Taking, take_in_halves
from .tasks import Ahead
from .unit import NOTHING_EXPIRES, OUTGOING, WORK, Change, Operation, Row, Tx
from .waiting import release_waiting

T = TypeVar("T")
log = logging.getLogger("ackbone.store")


class Leases(Protocol):
    """The leases that this process holds."""

    def beat(self, worker: Worker) -> None:
        """Renew a lease. Raises StoreUnavailable if that is not possible."""

    def is_present(self, worker: Worker) -> bool:
        """Return True if the worker may write: it has not left and was not declared dead."""


class Waiters(Protocol):
    """The events that wait for wake-ups in this process."""

    def unsubscribe(self, event: asyncio.Event) -> None: ...


class BaseStore(RunWrites[X]):
    """Claims, effects, keys, lanes and the ledger in one database."""

    sql: Statements
    _leases: Leases
    _ledger: Chains
    _waiters: Waiters

    def __init__(
        self,
        *,
        queue: Transactional | None,
        is_local: Callable[[str], bool],
        isolates: bool,
        notices: NoticesOf | None,
        subscribers: Subscribers | None,
    ) -> None:
        """`queue`: the broker in the same database, if there is one: taking a message and claiming
        it is one commit then. `is_local` returns True for the queues of that broker.
        `notices`: by the name of a subscription, the queues that learn how its tasks end.
        `subscribers`: places that get events, by deliveries that are committed with them.
        `isolates`: a supervisor starts child processes for messages that crashed their workers."""
        super().__init__(notices, subscribers, queue, is_local)
        self._opened: Any = None
        """The open database, as the dialect knows it."""
        self._isolates = isolates
        self._expiry_paused = False
        self.governed = False
        self.quotas_of: QuotasOf | None = None
        self._fleet = Fleet()

    async def open(self) -> None:
        if self._opened is None:
            self._opened = await self._open()

    @abstractmethod
    async def _open(self) -> Any:
        """Open the database, and make `_leases`, `_ledger` and `_waiters` for it."""

    async def close(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            await self._close(opened)

    @abstractmethod
    async def _close(self, opened: Any) -> None: ...

    @property
    def expiry_paused(self) -> bool:
        """True while a jump of the clock makes times to live doubtful: nothing expires."""
        return self._expiry_paused or (self._opened is not None and self._clock_is_in_doubt())

    @expiry_paused.setter
    def expiry_paused(self, paused: bool) -> None:
        self._expiry_paused = paused

    def expiry_us(self, now_us: int) -> int:
        """Return the moment up to which messages expire: none while the clock is in doubt."""
        return NOTHING_EXPIRES if self.expiry_paused else now_us

    @abstractmethod
    def _clock_is_in_doubt(self) -> bool:
        """Return True if the clock of the database was set moments ago."""

    @abstractmethod
    async def read_due(self, statement: str, *values: Any) -> list[Row]:
        """As `read`, for rows whose time has come by the clock that the rows were written by.

        Nothing is due after the clock was set until the waiting rows have moved with it."""

    @abstractmethod
    async def write_once(self, op: Operation[T], *, worker_id: int) -> T:
        """As `write`, for an operation that would fail if it were repeated after it succeeded."""

    @abstractmethod
    def subscribe_to(self, *topics: str) -> asyncio.Event:
        """An event that is set after each commit that wakes one of these topics."""

    def subscribe(self) -> asyncio.Event:
        """An event that is set whenever there may be new work."""
        return self.subscribe_to(WORK)

    def unsubscribe(self, event: asyncio.Event) -> None:
        if self._opened is not None:
            self._waiters.unsubscribe(event)

    def look_again(self) -> None:
        """Wake everything in this process that waits for due work: the clock was moved."""
        if self._opened is not None:
            self._wake_here(WORK + OUTGOING)

    @abstractmethod
    def _wake_here(self, topics: str) -> None: ...

    # -- workers ----------------------------------------------------------------------------------

    async def register(
        self, name: str, offers: Offers | None = None, *, parent: str | None = None
    ) -> Worker:
        worker_id = await self._register(name, offers_text(offers), parent)
        self._fleet.forget()
        return Worker(worker_id=worker_id, name=name, offers=offers)

    @abstractmethod
    async def _register(self, name: str, offers: str | None, parent: str | None) -> int:
        """Write a new worker that is alive, with its lease; return its id."""

    async def announce(self, worker: Worker, offers: Offers) -> Worker:
        number = worker.worker_id
        await self.write(
            lambda tx, change: tx.send(tx.sql.workers.announce, number, offers_text(offers)),
            worker_id=number,
        )
        self._fleet.forget()
        return msgspec.structs.replace(worker, offers=offers)

    async def leave(self, worker: Worker, *, running: bool = False) -> None:
        number = worker.worker_id

        async def op(tx: Tx, change: Change) -> None:
            if running:  # its lease says when the process is gone; its runs are handed back then
                tx.before_end(tx.sql.workers.leaving, number)
                return
            await workers.leave(tx, change, number)
            if self._ledger.is_blank(number) and not change.entries:
                tx.before_end(tx.sql.workers.forget, number)  # it has no chain (see `prune`)

        await self.write(op, worker_id=number)

    def beat(self, worker: Worker) -> None:
        self._leases.beat(worker)

    def is_registered(self, worker: Worker) -> bool:
        return self._leases.is_present(worker)

    async def reap(
        self,
        *,
        worker: Worker,
        lease_s: float,
        crash_budget: int,
        ended: Mapping[str, int] | None = None,
    ) -> Reclaimed:
        children = ended or {}
        missing = await self._missing(worker, lease_s, children)
        if missing is None:
            return Reclaimed()

        async def op(tx: X, change: Change) -> Reclaimed:
            gone = await missing(tx)
            return await workers.reap(
                tx, change, gone, me=worker, crash_budget=crash_budget, ended=children
            )

        found = await self.write(op, worker_id=worker.worker_id)
        self._fleet.forget()
        return found

    @abstractmethod
    async def _missing(
        self, me: Worker, lease_s: float, ended: Mapping[str, int]
    ) -> Callable[[X], Awaitable[Sequence[workers.Gone]]] | None:
        """Look for workers whose lease is over. Return what finds them in a transaction; None if
        nobody is missing, or if this process cannot know."""

    async def identity(self) -> str:
        """The id of this store. No other store ever gets the same one."""
        found = await self.read(self.sql.store.identity)
        if not found:
            await self.write_once(
                lambda tx, change: tx.send(tx.sql.store.set_identity, new_id()), worker_id=0
            )
            found = await self.read(self.sql.store.identity)
        return str(found[0][0])

    # -- claim and finish -------------------------------------------------------------------------

    async def hold_back(self, send: Send) -> None:
        """Keep a message that is not due yet; the outbox publishes it when it is."""

        async def op(tx: Tx, change: Change) -> None:
            change.sends.append(send)

        await self.write_once(op, worker_id=0)

    # -- relays -----------------------------------------------------------------------------------

    async def to_cancel(self, *, worker: Worker) -> Sequence[tuple[str, str, str]]:
        found = await self.read(self.sql.store.to_cancel, worker.worker_id)
        return [(tenant_id, sub, message_id) for tenant_id, sub, message_id in found]

    async def resume_parked(
        self, kind: str, types: Sequence[str], *, subscription: str, worker: Worker
    ) -> int:
        asked = parked.waits_for_handler(kind, subscription, types)
        if not await self.read(self.sql.operations.wait_for_handler, *asked):
            return 0
        return await self.write(
            lambda tx, change: parked.resume_for_handler(tx, change, kind, subscription, types),
            worker_id=worker.worker_id,
        )

    async def suspects(self, subscriptions: Sequence[str], *, worker: Worker) -> Suspects:
        if not self._isolates:
            return Suspects()
        found = await self.read_due(self.sql.store.suspects_due, list(subscriptions))
        if found and self._fleet.age_s >= LOOK_S:
            offers = await self.read(self.sql.workers.offers, GRACE_US, self._now_us())
            self._fleet.update(text for (text,) in offers)
        return self._fleet.suspects(worker, [(sub, kind, few, n) for sub, kind, few, n in found])

    async def ended(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(name for (name,) in await self.read(self.sql.workers.ended, list(names)))

    async def paused(self) -> frozenset[str]:
        return frozenset(name for (name,) in await self.read(self.sql.store.paused))

    async def is_empty(self, subscriptions: Sequence[str]) -> bool:
        """Return True if nothing waits, runs or is due later, parked messages aside."""
        ((busy,),) = await self.read(self.sql.store.busy, list(subscriptions))
        return not busy

    async def stuck(self, subscriptions: Sequence[str]) -> int:
        ((left,),) = await self.read(self.sql.store.stuck, list(subscriptions))
        return int(left)

    async def hold_role(self, role: str, *, worker: Worker) -> bool:
        """Take or keep a role. It is free as soon as the worker that holds it is not alive."""
        number = worker.worker_id
        if await self.read(self.sql.store.holds_role, role, number):
            return True
        taken = await self.write(
            lambda tx, change: tx.rows(tx.sql.store.take_role, role, number),
            worker_id=number,
            durable=False,
        )
        return bool(taken)

    # -- claim ------------------------------------------------------------------------------------

    async def next_due_s(self, sub: Subscription) -> float | None:
        ((wait_us,),) = await self.read(self.sql.store.next_due, sub.name, self._now_us())
        return None if wait_us is None else max(0.0, wait_us / 1e6)

    @abstractmethod
    def _now_us(self) -> int | None:
        """The time (µs) if this process knows it; None: the database has the clock."""

    @abstractmethod
    def _ahead(self) -> Ahead:
        """Return how far the store's clock is ahead of this machine's clocks."""

    def _claim_is_answered(self, sub: Subscription, batch: Sequence[Candidate] | None) -> None:
        """The answer to a claim was committed. None: a claim of messages that the store holds."""

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
        """One transaction. A message that no row can hold ends as `unstorable`, as in `claim`."""
        if self._queue is None:
            raise StoreCorrupt("taking from the queue needs a queue in the same database")

        async def commit(taking: Taking, n: int) -> Taken:
            async def op(tx: Tx, change: Change) -> Taken:
                return await taking.take(self._claiming(tx, change, sub, worker), n)

            # Not synced, whatever it answers: a crash that takes a verdict back puts the message
            # back into the queue, because both are the same commit.
            taken = await self.write(op, worker_id=worker.worker_id, durable=False)
            self._claim_is_answered(sub, None)
            return taken

        return await take_in_halves(self._queue, decode, commit, limit=limit)

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
        self,
        sub: Subscription,
        batch: Sequence[Candidate],
        *,
        worker: Worker,
        opened: Collection[str] = (),
    ) -> Sequence[Verdict] | None:
        in_parts = bool(opened) or any(c.delivery.part is not None for c in batch)

        async def op(tx: Tx, change: Change) -> list[Verdict] | None:
            if not in_parts and not await tx.lanes.own_source(sub.name, worker.worker_id):
                return None
            if not batch and not opened:  # asked whether this worker is the one that fetches
                return []
            change.topics.add(WORK)
            claim = self._claiming(tx, change, sub, worker)
            return await claims.adopt_in_order(claim, batch, opened)

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
        """One transaction for the batch. A run whose outcome no row can hold ends as a dead letter,
        and is answered BURIED."""

        async def finish_some(some: Sequence[Finished]) -> Sequence[Commit]:
            return await self.write(
                lambda tx, change: finish(tx, change, some), worker_id=worker.worker_id
            )

        async def unstorable(item: Finished, error: Exception) -> Commit:
            log.error(
                "message %s: its outcome cannot be stored", item.run.message.id, exc_info=error
            )
            dead = Dead(reason=UNSTORABLE, error=f"{type(error).__name__}: {error}")
            bare = Finished(  # without everything that the database might have refused
                run=item.run,
                outcome=dead,
                started_at_us=item.started_at_us,
                finished_at_us=item.finished_at_us,
            )
            (commit,) = await finish_some([bare])
            return Commit.FENCED if commit is Commit.FENCED else Commit.BURIED

        return await commit_in_halves(batch, finish_some, unstorable)

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
