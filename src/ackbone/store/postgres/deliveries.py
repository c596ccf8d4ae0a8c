"""The deliveries table: replies on their way out, and where they are now."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ackbone.core import parcels
from ackbone.core.delivery import Fits, Limits, New, Outbound, Settled, Status, Taken
from ackbone.core.parcels import ASIDE, PAGE, Choice, Ending, Windows
from ackbone.core.store import Worker
from ackbone.store.outgoing import new_delivery_row
from ackbone.store.parcel_rows import parcel_of, whole
from ackbone.store.unit import Change

from . import delivery_rows as sql
from .database import Tx
from .delivery_rows import Rows
from .finish import DELIVERIES, delivery_values
from .store import PostgresStore
from .wake import OUTGOING


class PostgresDeliveries:
    """`Deliveries` of the store's database. A change of a row compares and sets its status."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._turn = 0
        self._freeing: set[str] = set()
        """Windows that were opened, and by which more are put off than one write makes due."""
        self._unsure: dict[str, int] = {}
        """Calls that were granted, if that was committed: no answer came."""
        self._loose: dict[str, int] = {}
        """The same of followers: their head went without them."""

    async def put(self, replies: Sequence[New], *, worker: Worker | None = None) -> None:
        async def op(tx: Tx, change: Change) -> None:
            now = await tx.moment()
            rows = [new_delivery_row(each, now) for each in replies]
            tx.at_end(DELIVERIES, *delivery_values(rows))
            change.topics.add(OUTGOING)

        if replies:
            await self._store.write(op, worker_id=0 if worker is None else worker.worker_id)

    # -- take -------------------------------------------------------------------------------------

    async def due_in_s(self, channels: Mapping[str, Limits]) -> float | None:
        rows = self._store.read
        now, levels = await sql.levels(rows, channels)
        moments: list[int] = []
        for channel, found in levels.items():
            for priority, due in found:
                if due > now:
                    moments.append(due)
                    continue
                choice, _ = await self._chosen(rows, channel, priority, channels[channel], now, 1)
                if choice.changes:
                    return 0.0
                if choice.blocked_us is not None:
                    moments.append(choice.blocked_us)
                    break
        return parcels.in_s(moments, now)

    async def take(self, channels: Mapping[str, Limits], *, limit: int, worker: Worker) -> Taken:
        # Most often there is nothing: that must cost no commit.
        wait_s = 0.0 if self._unsure else await self.due_in_s(channels)
        if wait_s != 0 or limit < 1:
            return Taken((), wait_s)
        self._turn += 1
        turn = self._turn

        async def op(tx: Tx, change: Change) -> Taken:
            await tx.require_alive(worker.worker_id, or_leaving=True)
            now = await tx.hold_deliveries()
            taking = _Taking(self, tx, change, worker, now)
            return await taking.take(channels, limit, turn)

        taken = await self._store.write(op, worker_id=worker.worker_id)
        self._unsure.clear()
        return taken

    async def follow(
        self, head: Outbound, fits: Fits, *, limit: int, worker: Worker
    ) -> Sequence[Outbound]:
        me = worker.worker_id
        unsure: dict[str, Outbound] = {}

        async def op(tx: Tx, change: Change) -> list[Outbound]:
            await tx.require_alive(me, or_leaving=True)
            now = await tx.hold_deliveries()
            if unsure:  # what an earlier commit without an answer granted
                calls = {reply.id: reply.call for reply in unsure.values()}
                mine = {row[0] for row in await sql.held(tx, calls, me)}
                if mine:
                    return [reply for reply in unsure.values() if reply.id in mine]
            behind = await sql.behind(tx.rows, head, me, limit)
            expiry = 0 if self._store.expiry_paused else now
            found = parcels.followers(head, behind, fits, expiry_us=expiry)
            tx.if_unknown = lambda: unsure.update({reply.id: reply for reply in found})
            await sql.grant(tx, [reply.id for reply in found], me, now)
            change.entries += parcels.first_events(parcel for parcel, _ in behind[: len(found)])
            return found

        # As for `take`: a head behind which nobody can follow costs no commit.
        first = await sql.behind(self._store.read, head, me, min(1, limit))
        if not parcels.followers(head, first, fits, expiry_us=0):
            return ()
        try:
            return await self._store.write(op, worker_id=me)
        except BaseException:
            self._loose |= {reply.id: reply.call for reply in unsure.values()}
            raise

    async def _chosen(
        self, rows: Rows, channel: str, priority: int, limits: Limits, now: int, room: int
    ) -> tuple[Choice, Windows]:
        # Whatever the first one is, it can be taken, changes, or blocks the channel.
        page = await sql.page(rows, channel, priority, now, PAGE if room > 1 else 1)
        asked = parcels.limits_of(page, limits)
        windows = await sql.windows(rows, parcels.keys_of(asked))
        expiry = 0 if self._store.expiry_paused else now
        choice = parcels.choose(page, asked, windows, now_us=now, expiry_us=expiry, room=room)
        return choice, windows

    # -- settle -----------------------------------------------------------------------------------

    async def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], *, worker: Worker
    ) -> None:
        me = worker.worker_id
        loose = dict(self._loose)
        freeing = set(self._freeing)

        async def op(tx: Tx, change: Change) -> set[str]:
            now = await tx.hold_deliveries()
            if loose:
                await sql.end(tx, [_put_back(*each) for each in loose.items()], me, now)
                change.topics.add(OUTGOING)
            opened = await self._count(tx, channels, batch, now)
            more = await sql.free(tx, opened | freeing, now)
            endings = [parcels.ending_of(settled) for settled in batch]
            found = await sql.end(tx, endings, me, now)
            ended: list[str | None] = []
            for settled, ending in zip(batch, endings, strict=True):
                row = found.pop((ending.id, ending.call), None)
                if row is None:
                    continue
                change.entries += parcels.events_of(settled, row)
                if ending.is_end:
                    ended.append(row.lane)
                if ending.is_due or settled.frees is not None:
                    change.topics.add(OUTGOING)
            if await sql.promote(tx, ended, now) or tx.repeated or freeing:
                change.topics.add(OUTGOING)
            return more

        if batch:
            more = await self._store.write(op, worker_id=me)
            self._freeing = (self._freeing - freeing) | more
            self._loose = {id_: call for id_, call in self._loose.items() if id_ not in loose}

    async def _count(
        self, tx: Tx, channels: Mapping[str, Limits], batch: Sequence[Settled], now: int
    ) -> set[str]:
        """Returns the windows that were opened."""
        asked = parcels.settled_limits(channels, batch)
        keys = parcels.changed_keys(asked)
        windows = await sql.windows(tx.rows, keys)
        parcels.count_answers(asked, windows, now)
        await sql.save_windows(tx, windows, keys, now)
        return parcels.opened(batch, windows, now)

    # -- recover ----------------------------------------------------------------------------------

    async def recover(self, *, worker: Worker) -> int:
        me = worker.worker_id

        async def op(tx: Tx, change: Change) -> int:
            now = await tx.hold_deliveries()
            orphans = await sql.take_back(tx, me, now)
            if orphans:
                windows = await sql.counting_windows(tx.rows, now)
                changed = parcels.give_up_calls(windows, parcels.calls_of(orphans), now)
                await sql.save_windows(tx, windows, changed, now)
            for each in orphans:
                change.entries += parcels.orphan_events(each)
            change.topics.add(OUTGOING)
            return len(orphans)

        if not await self._store.read(sql.ORPHANS, str(me)):
            return 0
        return await self._store.write(op, worker_id=me)

    def subscribe(self) -> asyncio.Event:
        return self._store.subscribe_to(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)


def _put_back(delivery_id: str, call: int) -> Ending:
    """It was granted and never sent."""
    return Ending(id=delivery_id, call=call, status=Status.PENDING, wait_us=0)


class _Taking:
    """One call of `take`, inside its transaction."""

    def __init__(
        self, queue: PostgresDeliveries, tx: Tx, change: Change, worker: Worker, now: int
    ) -> None:
        self._queue = queue
        self._tx = tx
        self._change = change
        self._worker_id = worker.worker_id
        self._now = now
        self._blocked: dict[str, int] = {}
        self._aside = 0
        self._taken: list[Outbound] = []

    async def take(self, channels: Mapping[str, Limits], limit: int, turn: int) -> Taken:
        tx, now, taken = self._tx, self._now, self._taken
        tx.if_unknown = self._note
        await self._take_unsure()
        _, levels = await sql.levels(tx.rows, channels)
        due = {name: [p for p, at in found if at <= now] for name, found in levels.items()}
        for channel, priority in parcels.turns(due, turn):
            limits = channels[channel]
            while self._aside < ASIDE and len(taken) < limit and channel not in self._blocked:
                if not await self._page(channel, priority, limits, limit - len(taken)):
                    break
        if len(taken) >= limit or self._aside >= ASIDE:
            return Taken(taken, 0.0)
        _, levels = await sql.levels(tx.rows, [c for c in levels if c not in self._blocked])
        waiting = [at for found in levels.values() for _, at in found]
        return Taken(taken, parcels.in_s([*waiting, *self._blocked.values()], now))

    def _note(self) -> None:
        self._queue._unsure.update({reply.id: reply.call for reply in self._taken})

    async def _take_unsure(self) -> None:
        """What an earlier commit without an answer granted is this worker's, and not yet sent."""
        unsure = self._queue._unsure
        if unsure:
            for *row, content, receipts in await sql.held(self._tx, unsure, self._worker_id):
                self._taken.append(whole(parcel_of(row), content, receipts))

    async def _page(self, channel: str, priority: int, limits: Limits, room: int) -> bool:
        """Serve one page; False: there is no other."""
        tx, now, entries = self._tx, self._now, self._change.entries
        choice, windows = await self._queue._chosen(tx.rows, channel, priority, limits, now, room)
        self._aside += choice.set_aside
        if choice.blocked_us is not None:
            self._blocked[channel] = choice.blocked_us
        await sql.queue(tx, choice.queued)
        await sql.put_off(tx, choice.put_off)
        await sql.expire(tx, choice.expired)
        await sql.promote(tx, [parcel.lane for parcel in choice.expired], now)
        entries += [parcels.expired_event(parcel) for parcel in choice.expired]
        entries += parcels.first_events(choice.granted)
        ids = [parcel.reply.id for parcel in choice.granted]
        given = await sql.grant(tx, ids, self._worker_id, now)
        for parcel in choice.granted:
            self._taken.append(whole(parcel, *given[parcel.reply.id]))
        await sql.save_windows(tx, windows, choice.keys, now)
        return choice.may_go_on
