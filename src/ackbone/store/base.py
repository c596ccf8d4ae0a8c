"""The store as the engine sees it, as far as both dialects are alike.

A dialect adds how it opens its database, its transaction (`ackbone.store.commit`), its leases, and
claims. Each method here is one transaction, or one look.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ackbone.core.ids import new_id
from ackbone.core.outbound.subscribers import Subscribers
from ackbone.core.store import (
    EffectState,
    Offers,
    QuotasOf,
    Reply,
    Run,
    Send,
    Suspects,
    Worker,
)

from . import parked, runs, workers
from .commit import Transactions, X
from .fleet import LOOK_S, Fleet, offers_text
from .notices import NoticesOf
from .sql import Statements
from .unit import NOTHING_EXPIRES, WORK, Change, Operation, Row, Tx

T = TypeVar("T")


class BaseStore(Transactions[X]):
    """Claims, effects, keys, lanes and the ledger in one database."""

    sql: Statements

    def __init__(
        self, *, isolates: bool, notices: NoticesOf | None, subscribers: Subscribers | None
    ) -> None:
        """`notices`: by the name of a subscription, the queues that learn how its tasks end.
        `subscribers`: places that get events, by deliveries that are committed with them.
        `isolates`: a supervisor starts child processes for messages that crashed their workers."""
        super().__init__(notices, subscribers)
        self._isolates = isolates
        self._expiry_paused = False
        self.governed = False
        self.quotas_of: QuotasOf | None = None
        self._fleet = Fleet()

    @property
    def expiry_paused(self) -> bool:
        """True while a jump of the clock makes times to live doubtful: nothing expires."""
        return self._expiry_paused or self._clock_is_in_doubt()

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
        """See `UnitOfWork.read_due`."""

    @abstractmethod
    async def write_once(self, op: Operation[T], *, worker_id: int) -> T:
        """See `UnitOfWork.write_once`."""

    @abstractmethod
    def subscribe_to(self, *topics: str) -> asyncio.Event:
        """See `UnitOfWork.subscribe_to`."""

    def subscribe(self) -> asyncio.Event:
        """An event that is set whenever there may be new work."""
        return self.subscribe_to(WORK)

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
            if self._is_blank(number) and not change.entries:
                tx.before_end(tx.sql.workers.forget, number)  # it has no chain (see `prune`)

        await self.write(op, worker_id=number)

    @abstractmethod
    def _is_blank(self, worker_id: int) -> bool:
        """Return True if it is certain that the ledger has no event of this worker."""

    @abstractmethod
    async def _offers(self) -> Sequence[Row]:
        """The offers of the workers that are there, or ended less than GRACE_S ago."""

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

    async def adopt(self, batch: Sequence[Run], *, worker: Worker) -> Sequence[bool]:
        return await self.write(
            lambda tx, change: runs.adopt(tx, batch, worker.worker_id), worker_id=worker.worker_id
        )

    async def hold_back(self, send: Send) -> None:
        """Keep a message that is not due yet; the outbox publishes it when it is."""

        async def op(tx: Tx, change: Change) -> None:
            change.sends.append(send)

        await self.write_once(op, worker_id=0)

    # -- during a run -----------------------------------------------------------------------------

    async def effect_begin(
        self, run: Run, name: str, *, again: bool = False
    ) -> tuple[EffectState, bytes | None]:
        return await self._of_run(
            run, lambda tx, change: runs.effect_begin(tx, change, run, name, again=again)
        )

    async def effect_done(self, run: Run, name: str, result: bytes, *, again: bool = False) -> None:
        await self._of_run(
            run, lambda tx, change: runs.effect_done(tx, change, run, name, result, again=again)
        )

    async def effect_raised(self, run: Run, name: str, error: str) -> None:
        await self._of_run(run, lambda tx, change: runs.effect_raised(tx, run, name, error))

    async def effect_clear(self, run: Run, name: str) -> None:
        await self._of_run(run, lambda tx, change: runs.effect_clear(tx, run, name))

    async def heartbeat(self, run: Run, data: Mapping[str, Any]) -> None:
        await self._of_run(run, lambda tx, change: runs.heartbeat(tx, change, run, data))

    async def reply_now(self, run: Run, reply: Reply, n: int) -> str:
        return await self._of_run(run, lambda tx, change: runs.reply_now(tx, change, run, reply, n))

    async def _of_run(self, run: Run, op: Callable[[X, Change], Awaitable[T]]) -> T:
        return await self.write(op, worker_id=run.token.worker_id)

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
            self._fleet.update(text for (text,) in await self._offers())
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
