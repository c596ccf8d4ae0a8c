"""`PostgresStore`: the store on one PostgreSQL database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from ackbone.core.broker import Subscription, Transactional
from ackbone.core.clock import Clock, to_us
from ackbone.core.errors import StoreError, StoreUnavailable
from ackbone.core.machine import this_machine
from ackbone.core.notices import Notices
from ackbone.core.outbound.subscribers import Subscribers
from ackbone.core.store import Candidate, Verdict, Worker
from ackbone.pgserver.address import Address
from ackbone.pgserver.connections import Row
from ackbone.pgserver.wake import WakeUps
from ackbone.store import workers
from ackbone.store.base import BaseStore
from ackbone.store.tasks import Ahead
from ackbone.store.unit import Change
from ackbone.store.waiting import release_waiting

from . import leases
from .database import Database, Look, Tx
from .key_rows import OWNER
from .ledger import Ledger
from .sql import SQL
from .timebase import ClockSet, TimeBase

T = TypeVar("T")
Operation = Callable[[Tx, Change], Awaitable[T]]
log = logging.getLogger("ackbone.store")

CLOCK_LOOKS = 5
"""A transaction gives up after it has found the server's clock set this often in a row."""


class PostgresStore(BaseStore[Tx]):
    """The store on one PostgreSQL database.

    `lease_s`: how long the leases of this process's workers last without being renewed.
    """

    sql = SQL
    forgets_claims = True
    """Claims are not synced, and workers outlive a crash of the server."""

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = 10.0,
        queue: Transactional | None = None,
        is_local: Callable[[str], bool] = lambda queue: True,
        clock: Clock | None = None,
        isolates: bool = True,
        notices: Callable[[str], Notices | None] | None = None,
        subscribers: Subscribers | None = None,
    ) -> None:
        super().__init__(
            queue=queue,
            is_local=is_local,
            isolates=isolates,
            notices=notices,
            subscribers=subscribers,
        )
        self._address = Address.from_url(url)
        self._clock = clock
        self._lease_s = lease_s

    async def _open(self) -> Database:
        database = Database(self._address, self._clock)
        await database.open()
        self._time = TimeBase(database.clock)
        self._watch = leases.BeatWatch()
        self._ledger: Ledger = Ledger(database)
        self._leases: leases.LeaseRenewal = leases.LeaseRenewal(self._address, self._lease_s)
        self._waiters: WakeUps = WakeUps(database)
        self._waiters.start()
        return database

    async def _close(self, opened: Database) -> None:
        await self._waiters.stop()
        await asyncio.to_thread(self._leases.close)
        await opened.close()

    @property
    def clock_jumps(self) -> int:
        return self._time.jumps

    @property
    def database(self) -> Database:
        if self._opened is None:
            raise StoreError(f"the store ({self._address.shown}) is not open")
        opened: Database = self._opened
        return opened

    def _clock_is_in_doubt(self) -> bool:
        return self._time.in_doubt

    # -- workers ----------------------------------------------------------------------------------

    async def _register(self, name: str, offers: str | None, parent: str | None) -> int:
        async def op(tx: Tx, change: Change) -> Row:
            values = (name[:255], str(self._lease_s), offers, this_machine(), parent)
            (row,) = await tx.rows(leases.REGISTER, *values)
            return row

        await self._time.follow(self.database)
        worker_id, started_at = await self.write(op, worker_id=0)
        self._ledger.begin(worker_id, to_us(started_at))
        self._leases.begin()
        return int(worker_id)

    async def _missing(
        self, me: Worker, lease_s: float, ended: Mapping[str, int]
    ) -> Callable[[Tx], Awaitable[Sequence[workers.Gone]]] | None:
        """A worker is dead if its beat has not changed for a lease by this process's steady clock,
        while the server answered and took the beats of this process."""
        clock = self.database.clock
        before = clock.monotonic()
        ((now, moved_us, server, ids, beats, orphans),) = await self.read(leases.LOOK, me.worker_id)
        heard = clock.monotonic()
        if not self._time.see(Look.of(before, now, heard), moved_us):
            await self._follow_clock()
        signs = [leases.Sign(*each) for each in zip(ids, beats, strict=True)]
        silent = self._watch.silent(signs, server, lease_s, before_s=before, now_s=heard)
        orphans = orphans and self._watch.is_settled(lease_s, before)
        if self.database.steady_s < lease_s or not self._leases.is_steady:
            silent, orphans = [], False  # only children whose end was seen are certainly dead
        if not silent and not orphans and not ended:
            return None
        return lambda tx: leases.missing(tx, me, silent, lease_s, list(ended))

    async def _follow_clock(self) -> None:
        """The server's clock was set: move what waits, and wake everything that waits for it."""
        jumps = self._time.jumps
        await self._time.follow(self.database)
        if self._time.jumps != jumps:
            self.look_again()

    # -- claim ------------------------------------------------------------------------------------

    async def adopt_in_order(
        self,
        sub: Subscription,
        batch: Sequence[Candidate],
        *,
        worker: Worker,
        opened: Collection[str] = (),
    ) -> Sequence[Verdict] | None:
        if not batch and not opened:
            # Asked before every fetch, and most often this worker is the fetcher.
            owner = await self.read(OWNER, sub.name)
            if owner:
                return [] if owner == [(worker.worker_id,)] else None
        return await super().adopt_in_order(sub, batch, worker=worker, opened=opened)

    def _now_us(self) -> None:
        return None

    def _ahead(self) -> Ahead:
        return self._time.ahead

    def _claim_is_answered(self, sub: Subscription, batch: Sequence[Candidate] | None) -> None:
        self.database.unsure.answered(sub, batch)

    # -- wake-ups ---------------------------------------------------------------------------------

    def subscribe_to(self, *topics: str) -> asyncio.Event:
        return self._waiters.subscribe("".join(topics))

    def _wake_here(self, topics: str) -> None:
        self._waiters.wake_here(topics)

    # -- the transaction --------------------------------------------------------------------------

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """One statement by itself."""
        return await self.database.read(statement, *values)

    async def read_due(self, statement: str, *values: Any) -> list[Row]:
        """See `BaseStore.read_due`. The statement returns the server's time as its last column,
        which is left out here."""
        clock = self.database.clock
        before = clock.monotonic()
        found = await self.database.read(statement, *values)
        if found and not self._time.agrees(Look.of(before, found[0][-1], clock.monotonic())):
            await self._follow_clock()
            return []
        return [row[:-1] for row in found]

    async def _transact(
        self, op: Operation[T], *, worker_id: int, durable: bool
    ) -> tuple[T, Change]:
        change = Change()

        async def attempt(tx: Tx) -> T:
            nonlocal change
            change = Change()  # the transaction may be undone and run again
            return await op(tx, change)

        async def commit(tx: Tx, finish: Callable[[], Awaitable[None]]) -> None:
            async def append() -> None:
                if change.durable and not durable:
                    tx.sync_after_all()
                synced = durable or change.durable
                if not self._time.see(await tx.look()):
                    raise ClockSet
                await self._ledger.commit(tx, worker_id, change.entries, finish, durable=synced)

            await self._conclude(tx, change, append)

        for _ in range(CLOCK_LOOKS):
            try:
                result = await self.database.write(
                    attempt, worker_id=worker_id, durable=durable, commit=commit
                )
                return result, change
            except ClockSet:
                await self._follow_clock()
        raise StoreUnavailable("the clock of the database server is being set over and over")

    async def _pass_on(self, tx: Tx, change: Change) -> None:
        """Nothing: keys and conversations are passed on after the commit."""

    async def _committed(self, change: Change, worker_id: int) -> None:
        await super()._committed(change, worker_id)
        if change.topics:
            self._waiters.wake("".join(sorted(change.topics)))
        if change.keys or change.lanes:
            await self._pass_on_after(change, worker_id)

    async def write_once(self, op: Operation[T], *, worker_id: int) -> T:
        """See `BaseStore.write_once`. An operation whose answer was lost is recognized by its
        first event, and is answered as it was."""
        made: tuple[T, Change, int] | None = None

        async def once(tx: Tx, change: Change) -> T:
            nonlocal made
            if made is not None and tx.repeated:
                result, first, since_us = made
                if await self._ledger.holds(tx, worker_id, first.entries[0], since_us):
                    change.keys, change.lanes = first.keys, first.lanes
                    change.topics = first.topics
                    return result
            result = await op(tx, change)
            made = (result, change, await tx.moment()) if change.entries else None
            return result

        return await self.write(once, worker_id=worker_id)

    async def _pass_on_after(self, change: Change, worker_id: int) -> None:
        try:
            await self.write(
                lambda tx, later: release_waiting(tx, later, change.keys, change.lanes),
                worker_id=worker_id,
            )
        except StoreError as error:
            # The operation is committed, and `resolve` looks at everything every few seconds.
            log.warning("keys and conversations are passed on later: %s", error)
