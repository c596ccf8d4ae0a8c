"""The deliveries table: replies on their way out, and where they are now."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping, Sequence

from ackbone.core import parcels
from ackbone.core.delivery import Fits, Limits, New, Outbound, Settled, Taken
from ackbone.core.errors import StoreUnavailable
from ackbone.core.parcels import ASIDE, PAGE, Choice, Windows
from ackbone.core.store import Worker
from ackbone.sqlite import rows
from ackbone.sqlite.file import TURN_WAIT_S
from ackbone.sqlite.wake import OUTGOING
from ackbone.store.outgoing import new_delivery_row
from ackbone.store.parcel_rows import whole

from . import delivery_rows as sql
from .ledger import Entry
from .outbox_rows import DELIVERY
from .roll import is_present_in
from .store import SqliteStore


class SqliteDeliveries:
    """`Deliveries` on the store's file. A change of a row compares and sets its status."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._turn = 0
        self._freeing: set[str] = set()
        """Windows that were opened, and by which more are put off than one write makes due."""

    async def put(self, replies: Sequence[New], *, worker: Worker | None = None) -> None:
        def op(conn: sqlite3.Connection, now: int) -> None:
            rows.insert(conn, DELIVERY, [new_delivery_row(each, now) for each in replies])
            self._store.file.wake_after_commit(OUTGOING)

        if replies:
            await self._store.write_rows(op, within_s=TURN_WAIT_S if worker is None else None)

    # -- take -------------------------------------------------------------------------------------

    async def due_in_s(self, channels: Mapping[str, Limits]) -> float | None:
        if self._store.file.clock_was_set:
            return 0.0  # by which time would they be due?
        now = self._store.clock.now_us()
        return await self._store.file.read(lambda conn: self._look(conn, channels, now))

    async def take(self, channels: Mapping[str, Limits], *, limit: int, worker: Worker) -> Taken:
        # Most often there is nothing: that must cost no commit.
        wait_s = await self.due_in_s(channels)
        if wait_s != 0 or limit < 1:
            return Taken((), wait_s)
        self._turn += 1
        turn = self._turn

        def op(conn: sqlite3.Connection, now: int) -> Taken:
            _require_alive(conn, worker)
            taking = _Taking(self, conn, worker, now)
            taken = taking.take(channels, limit, turn)
            self._store.ledger.append(conn, worker.worker_id, taking.entries, now)
            return taken

        return await self._store.write_rows(op)

    async def follow(
        self, head: Outbound, fits: Fits, *, limit: int, worker: Worker
    ) -> Sequence[Outbound]:
        me = worker.worker_id

        def op(conn: sqlite3.Connection, now: int) -> list[Outbound]:
            _require_alive(conn, worker)
            behind = sql.behind(conn, head, me, limit)
            expiry = self._store.expiry_us(now)
            found = parcels.followers(head, behind, fits, expiry_us=expiry)
            for reply in found:
                sql.grant(conn, reply.id, me, now)
            granted = (parcel for parcel, _ in behind[: len(found)])
            self._store.ledger.append(conn, me, parcels.first_events(granted), now)
            return found

        # As for `take`: a head behind which nobody can follow costs no commit.
        first = await self._store.file.read(lambda conn: sql.behind(conn, head, me, min(1, limit)))
        expiry = self._store.expiry_us(self._store.clock.now_us())
        if not parcels.followers(head, first, fits, expiry_us=expiry):
            return ()
        return await self._store.write_rows(op)

    def _look(
        self, conn: sqlite3.Connection, channels: Mapping[str, Limits], now: int
    ) -> float | None:
        """0 if a call of `take` would change anything."""
        moments: list[int] = []
        for channel in sql.unpaused(conn, channels):
            for priority, due in sql.levels(conn, channel):
                if due > now:
                    moments.append(due)
                    continue
                choice, _ = self._chosen(conn, channel, priority, channels[channel], now, 1)
                if choice.changes:
                    return 0.0
                if choice.blocked_us is not None:
                    moments.append(choice.blocked_us)
                    break
        return parcels.in_s(moments, now)

    def _chosen(
        self,
        conn: sqlite3.Connection,
        channel: str,
        priority: int,
        limits: Limits,
        now: int,
        room: int,
    ) -> tuple[Choice, Windows]:
        # Whatever the first one is, it can be taken, changes, or blocks the channel.
        page = sql.page(conn, channel, priority, now, PAGE if room > 1 else 1)
        asked = parcels.limits_of(page, limits)
        windows = sql.windows(conn, parcels.keys_of(asked))
        expiry = self._store.expiry_us(now)
        choice = parcels.choose(page, asked, windows, now_us=now, expiry_us=expiry, room=room)
        return choice, windows

    # -- settle -----------------------------------------------------------------------------------

    async def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], *, worker: Worker
    ) -> None:
        freeing = set(self._freeing)

        def op(conn: sqlite3.Connection, now: int) -> set[str]:
            opened = self._count(conn, channels, batch, now)
            more = sql.free(conn, opened | freeing, now)
            entries: list[Entry] = []
            ended: list[str | None] = []
            due = False
            for settled in batch:
                ending = parcels.ending_of(settled)
                found = sql.end(conn, ending, worker.worker_id, now)
                if found is None:
                    continue
                entries += parcels.events_of(settled, found)
                due = due or ending.is_due or settled.frees is not None
                if ending.is_end:
                    ended.append(found.lane)
            self._store.ledger.append(conn, worker.worker_id, entries, now)
            if sql.promote(conn, ended, now) or due or freeing:
                self._store.file.wake_after_commit(OUTGOING)
            return more

        if batch:
            more = await self._store.write_rows(op)
            self._freeing = (self._freeing - freeing) | more

    def _count(
        self,
        conn: sqlite3.Connection,
        channels: Mapping[str, Limits],
        batch: Sequence[Settled],
        now: int,
    ) -> set[str]:
        """Returns the windows that were opened."""
        asked = parcels.settled_limits(channels, batch)
        keys = parcels.changed_keys(asked)
        windows = sql.windows(conn, keys)
        parcels.count_answers(asked, windows, now)
        sql.save_windows(conn, windows, keys, now)
        return parcels.opened(batch, windows, now)

    # -- recover ----------------------------------------------------------------------------------

    async def recover(self, *, worker: Worker) -> int:
        def op(conn: sqlite3.Connection, now: int) -> int:
            orphans = sql.take_back(conn, worker.worker_id, now)
            if orphans:
                windows = sql.counting_windows(conn, now)
                changed = parcels.give_up_calls(windows, parcels.calls_of(orphans), now)
                sql.save_windows(conn, windows, changed, now)
                entries = [entry for each in orphans for entry in parcels.orphan_events(each)]
                self._store.ledger.append(conn, worker.worker_id, entries, now)
                self._store.file.wake_after_commit(OUTGOING)
            return len(orphans)

        orphans = await self._store.file.read(lambda conn: sql.has_orphans(conn, worker.worker_id))
        return await self._store.write_rows(op) if orphans else 0

    def subscribe(self) -> asyncio.Event:
        return self._store.file.subscribe(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)


def _require_alive(conn: sqlite3.Connection, worker: Worker) -> None:
    """What a dead number takes would be given to another at once."""
    if not is_present_in(conn, worker.worker_id):
        raise StoreUnavailable(f"worker {worker.worker_id} was declared dead; nothing taken")


class _Taking:
    """One call of `take`, inside its transaction."""

    def __init__(
        self,
        queue: SqliteDeliveries,
        conn: sqlite3.Connection,
        worker: Worker,
        now: int,
    ) -> None:
        self._queue = queue
        self._conn = conn
        self._worker_id = worker.worker_id
        self._now = now
        self._blocked: dict[str, int] = {}
        self._aside = 0
        self._taken: list[Outbound] = []
        self.entries: list[Entry] = []

    def take(self, channels: Mapping[str, Limits], limit: int, turn: int) -> Taken:
        conn, now, taken = self._conn, self._now, self._taken
        open_ = sql.unpaused(conn, channels)
        levels = {
            channel: [priority for priority, due in sql.levels(conn, channel) if due <= now]
            for channel in open_
        }
        for channel, priority in parcels.turns(levels, turn):
            limits = channels[channel]
            while self._aside < ASIDE and len(taken) < limit and channel not in self._blocked:
                if not self._page(channel, priority, limits, limit - len(taken)):
                    break
        if len(taken) >= limit or self._aside >= ASIDE:
            return Taken(taken, 0.0)
        waiting = [
            due
            for channel in open_
            if channel not in self._blocked
            for _, due in sql.levels(conn, channel)
        ]
        return Taken(taken, parcels.in_s([*waiting, *self._blocked.values()], now))

    def _page(self, channel: str, priority: int, limits: Limits, room: int) -> bool:
        """Serve one page; False: there is no other."""
        conn, now, entries = self._conn, self._now, self.entries
        choice, windows = self._queue._chosen(conn, channel, priority, limits, now, room)
        self._aside += choice.set_aside
        if choice.blocked_us is not None:
            self._blocked[channel] = choice.blocked_us
        sql.queue(conn, choice.queued)
        sql.put_off(conn, choice.put_off)
        sql.expire(conn, choice.expired)
        sql.promote(conn, [parcel.lane for parcel in choice.expired], now)
        entries += [parcels.expired_event(parcel) for parcel in choice.expired]
        entries += parcels.first_events(choice.granted)
        for parcel in choice.granted:
            content, receipts = sql.grant(conn, parcel.reply.id, self._worker_id, now)
            self._taken.append(whole(parcel, content, receipts))
        sql.save_windows(conn, windows, choice.keys, now)
        return choice.may_go_on
