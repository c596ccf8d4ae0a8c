"""`PostgresStore`: the store as the engine sees it; a method is one transaction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ackbone.core import events
from ackbone.core.broker import Notices, Subscription
from ackbone.core.clock import Clock, to_us
from ackbone.core.errors import StoreError, StoreUnavailable
from ackbone.core.ids import new_id
from ackbone.core.machine import this_machine
from ackbone.core.store import (
    Answer,
    Candidate,
    Commit,
    Company,
    EffectState,
    Finished,
    Offers,
    QuotasOf,
    Reclaimed,
    Reply,
    Run,
    Send,
    Suspects,
    Verdict,
    Worker,
)
from ackbone.core.subscribers import Subscribers
from ackbone.store import parked
from ackbone.store.fleet import GRACE_S, LOOK_S, Fleet, handled_by, offers_text
from ackbone.store.halving import commit_in_halves, finish_in_halves
from ackbone.store.outgoing import outbox_row
from ackbone.store.unit import Change

from . import arrays, ends, keys, lanes, looks, reaper, roles, roll, runs
from .address import Address
from .claiming import Claiming
from .claims import NEXT_DUE, Claims
from .database import Database, Look, Row, Tx
from .finish import OUTBOX, finish, outbox_values
from .ledger import Ledger
from .notices import Teller, tell_subscribers
from .sql import SQL
from .timebase import ClockSet, TimeBase
from .wake import OUTGOING, WORK, Bells

T = TypeVar("T")
Operation = Callable[[Tx, Change], Awaitable[T]]
log = logging.getLogger("ackbone.store")

CLOCK_LOOKS = 5
"""A transaction that finds the server's clock set this often in a row is given up."""


class PostgresStore:
    """Claims, effects, keys, lanes, ledger on one PostgreSQL database.

    `lease_s`: how long a sign of life of this process's workers lasts.
    """

    fused = False
    """The broker lives elsewhere."""
    forgets_claims = True
    """They are not synced, and workers outlive a crash of the server."""

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = 10.0,
        clock: Clock | None = None,
        isolates: bool = True,
        notices: Callable[[str], Notices | None] | None = None,
        subscribers: Subscribers | None = None,
    ) -> None:
        """`notices`: by a subscription's name, who is told of its tasks' ends. `subscribers`: who
        is told of events, by deliveries that are committed with them. `isolates`: somebody starts
        child processes for messages that crashed their workers."""
        self._address = Address.from_url(url)
        self._clock = clock
        self._lease_s = lease_s
        self._isolates = isolates
        self._teller = None if notices is None else Teller(notices)
        self._subscribers = subscribers
        self._opened: Database | None = None
        self._listeners: list[events.Listener] = []
        self._expiry_paused = False
        self.governed = False
        self.quotas_of: QuotasOf | None = None
        self._fleet = Fleet()

    async def open(self) -> None:
        if self._opened is None:
            database = Database(self._address, self._clock)
            await database.open()
            self._time = TimeBase(database.clock)
            self._watch = roll.Watch()
            self._ledger = Ledger(database)
            self._claims = Claims(isolates=self._isolates)
            self._pulse = roll.Pulse(self._address, self._lease_s)
            self._bells = Bells(database)
            self._bells.start()
            self._opened = database

    async def close(self) -> None:
        if self._opened is not None:
            database, self._opened = self._opened, None
            await self._bells.stop()
            await asyncio.to_thread(self._pulse.close)
            await database.close()

    @property
    def expiry_paused(self) -> bool:
        """True while a jump of the clock makes times to live doubtful: nothing expires."""
        return self._expiry_paused or (self._opened is not None and self._time.in_doubt)

    @expiry_paused.setter
    def expiry_paused(self, paused: bool) -> None:
        self._expiry_paused = paused

    @property
    def clock_jumps(self) -> int:
        return self._time.jumps

    @property
    def database(self) -> Database:
        if self._opened is None:
            raise StoreError(f"the store ({self._address.shown}) is not open")
        return self._opened

    # -- workers ----------------------------------------------------------------------------------

    async def register(
        self, name: str, offers: Offers | None = None, *, parent: str | None = None
    ) -> Worker:
        async def op(tx: Tx, change: Change) -> Row:
            values = (name[:255], str(self._lease_s), offers_text(offers), this_machine(), parent)
            (row,) = await tx.rows(roll.REGISTER, *values)
            return row

        await self._time.follow(self.database)
        worker_id, started_at = await self.write(op, worker_id=0)
        self._ledger.begin(worker_id, to_us(started_at))
        self._pulse.begin()
        self._fleet.forget()
        return Worker(worker_id=worker_id, name=name, offers=offers)

    async def announce(self, worker: Worker, offers: Offers) -> Worker:
        number = worker.worker_id
        await self.write(
            lambda tx, change: tx.send(roll.ANNOUNCE, str(number), offers_text(offers)),
            worker_id=number,
        )
        self._fleet.forget()
        return msgspec.structs.replace(worker, offers=offers)

    async def leave(self, worker: Worker, *, running: bool = False) -> None:
        number = worker.worker_id

        async def op(tx: Tx, change: Change) -> None:
            if running:  # its lease says when the process is gone: what runs is handed back then
                tx.before_end(roll.LEAVING, str(number))
                return
            await reaper.leave(tx, change, number)
            if self._ledger.is_blank(number) and not change.entries:
                tx.before_end(roll.FORGET, str(number))

        await self.write(op, worker_id=number)

    def beat(self, worker: Worker) -> None:
        self._pulse.beat(worker)

    def is_registered(self, worker: Worker) -> bool:
        return self._pulse.is_present(worker)

    async def reap(
        self,
        *,
        worker: Worker,
        lease_s: float,
        crash_budget: int,
        ended: Mapping[str, int] | None = None,
    ) -> Reclaimed:
        """A worker is dead when its sign of life has not changed for a lease by this process's
        steady clock, while the server answered and took the signs of this process."""
        clock = self.database.clock
        before = clock.monotonic()
        ((now, moved_us, server, ids, beats, orphans),) = await self.read(
            reaper.LOOK, str(worker.worker_id)
        )
        heard = clock.monotonic()
        if not self._time.see(Look.of(before, now, heard), moved_us):
            await self._follow_clock()
        signs = [roll.Sign(*each) for each in zip(ids, beats, strict=True)]
        silent = self._watch.silent(signs, server, lease_s, before_s=before, now_s=heard)
        orphans = orphans and self._watch.is_settled(lease_s, before)
        if self.database.steady_s < lease_s or not self._pulse.is_steady:
            silent, orphans = [], False  # nobody is dead but the children whose end was seen
        if not silent and not orphans and not ended:
            return Reclaimed()
        self._fleet.forget()
        return await self.write(
            lambda tx, change: reaper.reap(
                tx,
                change,
                me=worker,
                silent=silent,
                lease_s=lease_s,
                crash_budget=crash_budget,
                ended=ended or {},
            ),
            worker_id=worker.worker_id,
        )

    async def _follow_clock(self) -> None:
        """The server's clock was set: move what waits, and let everybody look who waits for it."""
        jumps = self._time.jumps
        await self._time.follow(self.database)
        if self._time.jumps != jumps:
            self.look_again()

    async def identity(self) -> str:
        """The name of this store, made when it was, and never another's."""
        await self.read(roles.NAME_STORE, new_id())
        ((found,),) = await self.read(roles.STORE_NAME)
        return str(found)

    # -- claim ------------------------------------------------------------------------------------

    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker
    ) -> Sequence[Verdict]:
        """One transaction for the batch. An item that no row can hold ends as `unstorable`."""
        if not batch:
            return []

        async def admit(some: Sequence[Candidate]) -> Sequence[Verdict]:
            verdicts = await self.write(
                lambda tx, change: self._claims.admit(
                    self._claiming(tx, change, sub, worker), some
                ),
                worker_id=worker.worker_id,
                durable=False,
            )
            self._claims.answered(sub, some)
            return verdicts

        async def unstorable(candidate: Candidate, error: Exception) -> Verdict:
            log.error("a message of %s cannot be stored: %s", sub.queue, error)

            async def op(tx: Tx, change: Change) -> None:
                change.entries += await ends.unstorable(tx, sub, candidate, worker.worker_id, error)

            await self.write(op, worker_id=worker.worker_id)
            return Verdict(answer=Answer.DEAD, delivery=candidate.delivery)

        return await commit_in_halves(batch, admit, unstorable)

    async def adopt_in_order(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker
    ) -> Sequence[Verdict] | None:
        if not batch:  # asked before every fetch, and most often it is the fetcher
            owner = await self.read(lanes.OWNER, sub.name)
            if owner:
                return [] if owner == [(worker.worker_id,)] else None

        async def op(tx: Tx, change: Change) -> list[Verdict] | None:
            claim = self._claiming(tx, change, sub, worker)
            found = await self._claims.adopt_in_order(claim, batch)
            if batch:
                change.topics.add(WORK)
            return found

        return await self.write(op, worker_id=worker.worker_id)

    async def claim_ready(
        self, sub: Subscription, *, limit: int, worker: Worker, company: Company = Company.ANY
    ) -> Sequence[Verdict]:
        verdicts = await self.write(
            lambda tx, change: self._claims.claim_ready(
                self._claiming(tx, change, sub, worker), limit, company
            ),
            worker_id=worker.worker_id,
            durable=False,  # whatever it answers: the message is in the row that it was in before
        )
        self._claims.answered(sub, None)
        return verdicts

    def _claiming(self, tx: Tx, change: Change, sub: Subscription, worker: Worker) -> Claiming:
        return Claiming(
            tx,
            change,
            sub,
            worker.worker_id,
            expiry=not self.expiry_paused,
            ahead=self._time.ahead,
            worker=worker.name,
            governed=self.governed,
            quotas_of=self.quotas_of,
            mine=handled_by(worker, sub.name),
            fleet=self._fleet,
        )

    async def next_due_s(self, sub: Subscription) -> float | None:
        ((due,),) = await self.read(NEXT_DUE, sub.name)
        return None if due is None else max(0.0, due)

    async def adopt(self, batch: Sequence[Run], *, worker: Worker) -> Sequence[bool]:
        async def op(tx: Tx, change: Change) -> list[bool]:
            return [await runs.adopt(tx, run, worker.worker_id) for run in batch]

        return await self.write(op, worker_id=worker.worker_id)

    # -- finish -----------------------------------------------------------------------------------

    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        """One transaction for the batch. An item that no row can hold ends as `unstorable`."""
        return await finish_in_halves(batch, lambda some: self._finish(some, worker))

    async def _finish(self, batch: Sequence[Finished], worker: Worker) -> Sequence[Commit]:
        return await self.write(
            lambda tx, change: finish(tx, change, batch), worker_id=worker.worker_id
        )

    async def resolve(self, *, worker: Worker) -> int:
        """A net: keys and lanes are looked at after each commit that may have freed one. And
        messages that were parked for an effect which turned out to be done go on."""
        if await self.read(SQL.operations.wait_for_effect):
            await self.write(parked.resume_for_effect, worker_id=worker.worker_id)
        waiting = await self.read(looks.WAITS_FOR_KEY)
        stuck = {(t, s, lane) for t, s, lane in await self.read(lanes.STUCK)}
        if not waiting and not stuck:
            return 0
        return await self._resolve(None, stuck, worker.worker_id)

    async def _resolve(
        self,
        wanted: Sequence[keys.Key] | None,
        freed: set[lanes.Lane],
        worker_id: int,
    ) -> int:
        """Tell those who wait for these keys (None: for any), and the next of these lanes."""

        async def op(tx: Tx, change: Change) -> int:
            moved = set(freed)
            if wanted is None or wanted:
                change.entries, more = await keys.resolve_keys(tx, wanted)
                moved |= more
            advanced = await lanes.advance(tx, moved)
            change.topics.add(WORK)
            return len(change.entries) + advanced

        return await self.write(op, worker_id=worker_id)

    async def hold_back(self, send: Send) -> None:
        """A message that is not due yet, for the outbox to publish when it is."""

        async def op(tx: Tx, change: Change) -> None:
            change.sends.append(send)

        await self.write(op, worker_id=0)

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
        await self._of_run(run, lambda tx, change: runs.effect_clear(tx, change, run, name))

    async def heartbeat(self, run: Run, data: Mapping[str, Any]) -> None:
        await self._of_run(run, lambda tx, change: runs.heartbeat(tx, change, run, data))

    async def reply_now(self, run: Run, reply: Reply, n: int) -> str:
        return await self._of_run(run, lambda tx, change: runs.reply_now(tx, change, run, reply, n))

    async def _of_run(self, run: Run, op: Operation[T]) -> T:
        return await self.write(op, worker_id=run.token.worker_id)

    # -- relays -----------------------------------------------------------------------------------

    async def to_cancel(self, *, worker: Worker) -> Sequence[tuple[str, str, str]]:
        found = await self.read(looks.TO_CANCEL, str(worker.worker_id))
        return [(tenant_id, sub, message_id) for tenant_id, sub, message_id in found]

    async def resume_parked(
        self, kind: str, types: Sequence[str], *, subscription: str, worker: Worker
    ) -> int:
        asked = parked.waits_for_handler(kind, subscription, types)
        if not await self.read(SQL.operations.wait_for_handler, *asked):
            return 0
        return await self.write(
            lambda tx, change: parked.resume_for_handler(tx, change, kind, subscription, types),
            worker_id=worker.worker_id,
        )

    async def suspects(self, subscriptions: Sequence[str], *, worker: Worker) -> Suspects:
        if not self._isolates:
            return Suspects()
        found = await self.read(looks.SUSPECTS, arrays.texts(list(subscriptions)))
        if found and self._fleet.age_s >= LOOK_S:
            offers = await self.read(roll.OFFERS, str(GRACE_S))
            self._fleet.update(text for (text,) in offers)
        return self._fleet.suspects(worker, found)

    async def paused(self) -> frozenset[str]:
        found = await self.read(looks.PAUSED)
        return frozenset(name for (name,) in found)

    async def is_empty(self, subscriptions: Sequence[str]) -> bool:
        """Nothing waits, runs or is due later (parked messages aside)."""
        ((busy,),) = await self.read(looks.BUSY, arrays.texts(list(subscriptions)))
        return not busy

    async def stuck(self, subscriptions: Sequence[str]) -> int:
        ((left,),) = await self.read(looks.STUCK, arrays.texts(list(subscriptions)))
        return int(left)

    async def hold_role(self, role: str, *, worker: Worker) -> bool:
        """A role's lease is its worker's: it is free as soon as that worker is not alive."""
        number = str(worker.worker_id)
        if await self.read(roles.HOLDS, role, number):
            return True
        return bool(await self.read(roles.TAKE, role, number))

    def on_events(self, listener: events.Listener) -> None:
        self._listeners.append(listener)

    def subscribe(self) -> asyncio.Event:
        return self._bells.subscribe()

    def subscribe_to(self, *topics: str) -> asyncio.Event:
        return self._bells.subscribe("".join(topics))

    def unsubscribe(self, event: asyncio.Event) -> None:
        if self._opened is not None:
            self._bells.unsubscribe(event)

    def look_again(self) -> None:
        """Whoever waits for due work looks now: the clock was moved."""
        if self._opened is not None:
            self._bells.ring_here(WORK + OUTGOING)

    # -- the transaction --------------------------------------------------------------------------

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """One statement by itself."""
        return await self.database.read(statement, *values)

    async def read_due(self, statement: str, *values: Any) -> list[Row]:
        """As `read`, for what is due: the last column of the rows is the server's time, and is
        left out. Nothing is due while the clock was set and what waits has not moved with it."""
        clock = self.database.clock
        before = clock.monotonic()
        found = await self.database.read(statement, *values)
        if found and not self._time.agrees(Look.of(before, found[0][-1], clock.monotonic())):
            await self._follow_clock()
            return []
        return [row[:-1] for row in found]

    async def write(self, op: Operation[T], *, worker_id: int, durable: bool = True) -> T:
        """One transaction; what it wrote into the ledger is told once it is committed, and who
        waits for what it let go is looked for. Not `durable`: only if the change asks for it."""
        change = Change()

        async def attempt(tx: Tx) -> T:
            nonlocal change
            change = Change()  # it may be undone and run again
            return await op(tx, change)

        async def commit(tx: Tx, finish: Callable[[], Awaitable[None]]) -> None:
            if self._teller is not None:
                await self._teller.tell(tx, change)
            if self._subscribers and change.entries:
                await tell_subscribers(tx, change, self._subscribers)
            if change.sends:
                now_us = await tx.moment()
                rows = [outbox_row(send, now_us) for send in change.sends]
                tx.at_end(OUTBOX, *outbox_values(rows))
                change.topics.add(OUTGOING)
            if change.durable and not durable:
                tx.sync_after_all()
            synced = durable or change.durable
            if not self._time.see(await tx.look()):
                raise ClockSet
            await self._ledger.commit(tx, worker_id, change.entries, finish, durable=synced)

        for _ in range(CLOCK_LOOKS):
            try:
                result = await self.database.write(
                    attempt, worker_id=worker_id, durable=durable, commit=commit
                )
                break
            except ClockSet:
                await self._follow_clock()
        else:
            raise StoreUnavailable("the clock of the database server is being set over and over")
        if change.entries:
            for listener in self._listeners:
                listener(change.entries)
        if change.topics:
            self._bells.ring("".join(sorted(change.topics)))
        if change.keys or change.lanes:
            await self._tell_waiting(change, worker_id)
        return result

    async def write_once(self, op: Operation[T], *, worker_id: int) -> T:
        """As `write`, for what a repeat would find done: an act whose answer was lost is known by
        its event, and answered as it was."""
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

    async def _tell_waiting(self, change: Change, worker_id: int) -> None:
        try:
            await self._resolve(sorted(change.keys), change.lanes, worker_id)
        except StoreError as error:
            # What was asked for is committed; the resolver looks at everything every few seconds.
            log.warning("those who wait for a key or their turn are told later: %s", error)
