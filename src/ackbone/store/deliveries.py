"""Deliveries: replies that are being sent, and where each of them is now.

Written once for both dialects. A change of a row compares and sets its status, so a worker that
was declared dead in the meantime changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ackbone.core.outbound import send_order, settling
from ackbone.core.outbound.delivery import Fits, Limits, New, Outbound, Settled, Taken
from ackbone.core.outbound.send_order import (
    ASIDE,
    PAGE,
    Choice,
    DueReply,
    Windows,
    state_of,
    window_of,
)
from ackbone.core.outbound.settling import FREED, SENDER_DIED, Orphan
from ackbone.core.store import Worker

from .base import BaseStore
from .delivery_rows import ALL, PAUSED, WindowRow, due_reply, new_delivery_row, with_content
from .sql.deliveries import DeliveriesSql
from .unit import OUTGOING, Change, Operation, Rows, Tx

T = TypeVar("T")


class StoreDeliveries:
    """`Deliveries` of a SQL store. Each dialect adds how it looks without a transaction, and what
    it does about commits whose answer was lost."""

    sql: DeliveriesSql

    def __init__(self, store: BaseStore[Any]) -> None:
        self._store = store
        self._turn = 0
        self._freeing: set[str] = set()
        """Windows that were opened and put off more replies than one transaction makes due."""

    async def put(self, replies: Sequence[New], *, worker: Worker | None = None) -> None:
        async def op(tx: Tx, change: Change) -> None:
            now = await tx.moment()
            tx.deliveries.insert([new_delivery_row(each, now) for each in replies])
            change.topics.add(OUTGOING)

        if replies and worker is None:
            await self._store.write_once(op, worker_id=0)
        elif replies and worker is not None:
            await self._store.write(op, worker_id=worker.worker_id)

    # -- take -------------------------------------------------------------------------------------

    async def due_in_s(self, channels: Mapping[str, Limits]) -> float | None:
        if self._takes_first():
            return 0.0
        return await self._look(lambda rows, now: self._due_in_s(rows, channels, now))

    async def _due_in_s(
        self, rows: Rows, channels: Mapping[str, Limits], now_us: int | None
    ) -> float | None:
        """Return 0 if a call of `take` would change anything."""
        now, levels = await _levels(rows, self.sql, channels, now_us)
        view = _View(rows, self.sql, now, self._store.expiry_us(now))
        moments: list[int] = []
        for channel, found in levels.items():
            for priority, due in found:
                if due > now:
                    moments.append(due)
                    continue
                choice, _ = await view.choose(channel, priority, channels[channel], room=1)
                if choice.changes:
                    return 0.0
                if choice.blocked_us is not None:
                    moments.append(choice.blocked_us)
                    break
        return send_order.in_s(moments, now)

    async def take(self, channels: Mapping[str, Limits], *, limit: int, worker: Worker) -> Taken:
        # Most often there is nothing to take. Looking costs no commit.
        wait_s = await self.due_in_s(channels)
        if wait_s != 0 or limit < 1:
            return Taken((), wait_s)
        return await self._take(channels, limit, worker.worker_id)

    async def _take(self, channels: Mapping[str, Limits], limit: int, worker_id: int) -> Taken:
        self._turn += 1
        turn = self._turn

        async def op(tx: Tx, change: Change) -> Taken:
            await tx.require_alive(worker_id, or_leaving=True)
            now = await tx.hold_deliveries()
            taking = _Taking(tx, change, worker_id, now, self._store.expiry_us(now))
            await self._granted_before(tx, worker_id, taking.taken)
            return await taking.take(channels, limit, turn)

        return await self._store.write(op, worker_id=worker_id)

    async def follow(
        self, head: Outbound, fits: Fits, *, limit: int, worker: Worker
    ) -> Sequence[Outbound]:
        me = worker.worker_id

        async def op(tx: Tx, change: Change) -> list[Outbound]:
            await tx.require_alive(me, or_leaving=True)
            now = await tx.hold_deliveries()
            behind = await self._behind(tx.rows, head, me, limit)
            expiry_us = self._store.expiry_us(now)
            found = send_order.followers(head, behind, fits, expiry_us=expiry_us)
            await _grant(tx, [reply.id for reply in found], me, now)
            change.entries += send_order.first_events(due for due, _ in behind[: len(found)])
            return found

        # As for `take`: looking costs no commit.
        first = await self._look(lambda rows, _: self._behind(rows, head, me, min(1, limit)))
        if not send_order.followers(head, first, fits, expiry_us=0):
            return ()
        return await self._write_followers(op, me)

    async def _behind(
        self, rows: Rows, head: Outbound, worker_id: int, limit: int
    ) -> list[tuple[DueReply, str]]:
        """Return the next replies of a lane whose head this worker is sending, with contents."""
        found = await rows(self.sql.behind, head.id, worker_id, head.call, limit)
        return [(due_reply(row), content) for *row, content in found]

    # -- settle -----------------------------------------------------------------------------------

    async def settle(
        self, channels: Mapping[str, Limits], batch: Sequence[Settled], *, worker: Worker
    ) -> None:
        if not batch:
            return
        freeing = set(self._freeing)
        more = await self._store.write(
            lambda tx, change: self._settle(tx, change, channels, batch, worker.worker_id, freeing),
            worker_id=worker.worker_id,
        )
        self._freeing = (self._freeing - freeing) | more

    async def _settle(
        self,
        tx: Tx,
        change: Change,
        channels: Mapping[str, Limits],
        batch: Sequence[Settled],
        worker_id: int,
        freeing: set[str],
    ) -> set[str]:
        """Return the windows that put off more replies than were made due."""
        now = await tx.hold_deliveries()
        await self._put_back(tx, change, worker_id, now)
        opened = await self._count(tx, channels, batch, now)
        more = await self._free(tx, opened | freeing, now)
        ends = [settling.attempt_end(settled) for settled in batch]
        found = await tx.deliveries.end(ends, worker_id, now)
        lanes: list[str | None] = []
        for settled, end in zip(batch, ends, strict=True):
            row = found.pop((end.id, end.call), None)
            if row is None:
                continue  # it is no longer this worker's
            change.entries += settling.events_of(settled, row)
            if end.is_end:
                lanes.append(row.lane)
            if end.is_due or settled.frees is not None:
                change.topics.add(OUTGOING)
        if await _promote(tx, lanes, now) or tx.repeated or freeing:
            change.topics.add(OUTGOING)
        return more

    async def _count(
        self, tx: Tx, channels: Mapping[str, Limits], batch: Sequence[Settled], now: int
    ) -> set[str]:
        """Count the answers in their windows; return the windows that were opened."""
        asked = settling.settled_limits(channels, batch)
        keys = settling.changed_keys(asked)
        windows = await _windows(tx.rows, self.sql, keys)
        settling.count_answers(asked, windows, now)
        await tx.deliveries.save_windows(_window_rows(windows, keys, now))
        return settling.opened_windows(batch, windows, now)

    async def _free(self, tx: Tx, keys: Iterable[str], now: int) -> set[str]:
        """Make replies due that these windows put off, the urgent and the oldest first. Return the
        windows that may have put off more."""
        return {key for key in keys if len(await tx.rows(self.sql.free, key, now, FREED)) == FREED}

    # -- recover ----------------------------------------------------------------------------------

    async def recover(self, *, worker: Worker) -> int:
        me = worker.worker_id

        async def op(tx: Tx, change: Change) -> int:
            now = await tx.hold_deliveries()
            orphans = [Orphan(*row) for row in await tx.rows(self.sql.orphans, me, ALL)]
            if orphans:
                ids = [each.id for each in orphans]
                await tx.send(self.sql.take_back, ids, now, SENDER_DIED)
                counting = await tx.rows(self.sql.counting_windows, now)
                windows = {key: window_of(state) for key, state in counting}
                changed = settling.give_up_calls(windows, settling.calls_of(orphans), now)
                await tx.deliveries.save_windows(_window_rows(windows, changed, now))
                for each in orphans:
                    change.entries += settling.orphan_events(each)
            change.topics.add(OUTGOING)
            return len(orphans)

        if not await self._store.read(self.sql.orphans, me, 1):
            return 0
        return await self._store.write(op, worker_id=me)

    def subscribe(self) -> asyncio.Event:
        return self._store.subscribe_to(OUTGOING)

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._store.unsubscribe(event)

    # -- what a dialect adds ----------------------------------------------------------------------

    def _takes_first(self) -> bool:
        """Return True if `take` has something to do before it can be told what is due."""
        return False

    async def _look(self, op: Callable[[Rows, int | None], Awaitable[T]]) -> T:
        """Run `op` without a transaction, with the time of now if this process knows it."""
        raise NotImplementedError

    async def _granted_before(self, tx: Tx, worker_id: int, taken: list[Outbound]) -> None:
        """Add replies that an earlier commit granted to this worker without its knowledge."""

    async def _write_followers(
        self, op: Operation[list[Outbound]], worker_id: int
    ) -> Sequence[Outbound]:
        return await self._store.write(op, worker_id=worker_id)

    async def _put_back(self, tx: Tx, change: Change, worker_id: int, now: int) -> None:
        """Make replies due again that were granted to this worker without its knowledge."""


class _Levels(NamedTuple):
    """The priorities of waiting replies, in channels that are not paused."""

    now_us: int
    by_channel: Mapping[str, Sequence[tuple[int, int]]]
    """The priorities, highest first, each with the moment when its first reply is due."""


async def _levels(
    rows: Rows, sql: DeliveriesSql, channels: Iterable[str], now_us: int | None
) -> _Levels:
    names = list(channels)
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    waiting = await rows(sql.levels, names, PAUSED, now_us)
    for channel, priority, due_us, _ in waiting:
        found[channel].append((priority, due_us))
    return _Levels(
        waiting[0][3] if waiting else now_us or 0,
        {name: sorted(each, reverse=True) for name, each in found.items()},
    )


class _View(NamedTuple):
    """The due replies at one moment."""

    rows: Rows
    sql: DeliveriesSql
    now_us: int
    expiry_us: int

    async def choose(
        self, channel: str, priority: int, limits: Limits, *, room: int
    ) -> tuple[Choice, Windows]:
        # With room for one the first reply decides: it is granted, changes, or blocks the channel.
        size = PAGE if room > 1 else 1
        found = await self.rows(self.sql.due, channel, priority, self.now_us, size)
        page = [due_reply(row) for row in found]
        asked = send_order.limits_of(page, limits)
        windows = await _windows(self.rows, self.sql, send_order.keys_of(asked))
        choice = send_order.choose(
            page, asked, windows, now_us=self.now_us, expiry_us=self.expiry_us, room=room
        )
        return choice, windows


class _Taking:
    """One call of `take`, inside its transaction."""

    def __init__(self, tx: Tx, change: Change, worker_id: int, now: int, expiry_us: int) -> None:
        self._tx = tx
        self._sql = tx.sql.deliveries
        self._change = change
        self._worker_id = worker_id
        self._now = now
        self._view = _View(tx.rows, self._sql, now, expiry_us)
        self._blocked: dict[str, int] = {}
        """Channels that wait, and until when."""
        self._aside = 0
        self.taken: list[Outbound] = []

    async def take(self, channels: Mapping[str, Limits], limit: int, turn: int) -> Taken:
        now, taken = self._now, self.taken
        _, levels = await _levels(self._tx.rows, self._sql, channels, now)
        due = {name: [p for p, at in found if at <= now] for name, found in levels.items()}
        for channel, priority in send_order.turns(due, turn):
            limits = channels[channel]
            while self._aside < ASIDE and len(taken) < limit and channel not in self._blocked:
                if not await self._page(channel, priority, limits, limit - len(taken)):
                    break
        if len(taken) >= limit or self._aside >= ASIDE:
            return Taken(taken, 0.0)
        free = [name for name in channels if name not in self._blocked]
        _, levels = await _levels(self._tx.rows, self._sql, free, now)
        waiting = [at for found in levels.values() for _, at in found]
        return Taken(taken, send_order.in_s([*waiting, *self._blocked.values()], now))

    async def _page(self, channel: str, priority: int, limits: Limits, room: int) -> bool:
        """Serve one page; return False if there is no other."""
        tx, now, entries = self._tx, self._now, self._change.entries
        choice, windows = await self._view.choose(channel, priority, limits, room=room)
        self._aside += choice.set_aside
        if choice.blocked_us is not None:
            self._blocked[channel] = choice.blocked_us
        if choice.queued:
            await tx.send(self._sql.queue, _ids(choice.queued))
        if choice.put_off:
            await tx.deliveries.put_off(choice.put_off)
        if choice.expired:
            await tx.send(self._sql.expire, _ids(choice.expired), send_order.EXPIRED)
            await _promote(tx, [due.lane for due in choice.expired], now)
        entries += [send_order.expired_event(due) for due in choice.expired]
        entries += send_order.first_events(choice.granted)
        given = await _grant(tx, _ids(choice.granted), self._worker_id, now)
        self.taken += [with_content(due, *given[due.reply.id]) for due in choice.granted]
        if choice.keys:
            await tx.deliveries.save_windows(_window_rows(windows, choice.keys, now))
        return choice.may_go_on


async def _grant(
    tx: Tx, ids: list[str], worker_id: int, now_us: int
) -> dict[str, tuple[str, str | None]]:
    """Mark replies as `sending`; return their contents and receipts by id."""
    if not ids:
        return {}
    given = await tx.rows(tx.sql.deliveries.grant, ids, worker_id, now_us)
    return {id_: (content, receipts) for id_, content, receipts in given}


async def _promote(tx: Tx, lanes: Iterable[str | None], now_us: int) -> bool:
    """Make the next reply of each of these lanes due; return False if there is none."""
    names = [lane for lane in dict.fromkeys(lanes) if lane is not None]
    return bool(names) and bool(await tx.rows(tx.sql.deliveries.promote, names, now_us))


async def _windows(rows: Rows, sql: DeliveriesSql, keys: Iterable[str]) -> Windows:
    """Return those of these windows that exist."""
    names = list(keys)
    found = await rows(sql.windows, names) if names else []
    return {key: window_of(state) for key, state in found}


def _window_rows(windows: Windows, keys: Iterable[str], now_us: int) -> list[WindowRow]:
    return [(key, state_of(windows[key], now_us), windows[key].ends_at) for key in keys]


def _ids(found: Iterable[DueReply]) -> list[str]:
    return [due.reply.id for due in found]
