"""`SqliteStore`: the store as the engine sees it; a method is one operation of the writer."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ackbone.core import events
from ackbone.core.broker import Notices, Subscription, Transactional
from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import StoreUnavailable
from ackbone.core.ids import new_id
from ackbone.core.store import (
    Answer,
    Candidate,
    Commit,
    Company,
    Decode,
    EffectState,
    Finished,
    Offers,
    QuotasOf,
    Reclaimed,
    Reply,
    Run,
    Send,
    Suspects,
    Taken,
    Verdict,
    Worker,
    lets_go,
)
from ackbone.core.subscribers import Subscribers
from ackbone.sqlite import rows
from ackbone.sqlite.file import TURN_WAIT_S, Op, SqliteFile, close_file, open_file
from ackbone.sqlite.wake import OUTGOING, WORK
from ackbone.store import parked
from ackbone.store.crash import ALONE_AT, SUSPECT_AT
from ackbone.store.fleet import GRACE_S, LOOK_S, Fleet, handled_by
from ackbone.store.halving import finish_in_halves
from ackbone.store.outgoing import outbox_row
from ackbone.store.stored import UNENDED, Ahead, crc, run_info
from ackbone.store.unit import NOTHING_EXPIRES, Change, Operation, Row, run_now
from ackbone.store.unit import OUTGOING as OUTGOING_TOPIC

from .claiming import OFFERS, Claiming
from .claims import Claims, next_due
from .finish import Finisher
from .keys import resolve_key
from .lanes import advance_lane, own_source
from .ledger import Entry, Ledger
from .looks import BUSY, STUCK
from .notices import NoticeWriter
from .outbox_rows import OUTBOX
from .quotas import SqliteQuotaBook
from .roll import Roll, is_alive_in
from .runs import RunWriter
from .sql import SQL
from .tx import SqliteTx, parameters

T = TypeVar("T")
log = logging.getLogger("ackbone.store")

_PRIORITIES = (3, 2, 1, 0)
_SUSPECTS = (
    f"SELECT subscription, event_name, sum(crashes < {ALONE_AT}), sum(crashes >= {ALONE_AT})"
    " FROM (SELECT subscription, event_name, crashes FROM queue_executions"
    f" WHERE status = 'ready' AND crashes >= {SUSPECT_AT} AND due_at <= ?2"
    " AND subscription IN (SELECT value FROM json_each(?1)) LIMIT 1000) GROUP BY 1, 2"
)
TO_CANCEL = (
    "SELECT tenant_id, subscription, message_id FROM queue_executions"
    " WHERE worker_id = ? AND status = 'running' AND cancel_at IS NOT NULL"
)
_WAKES = {Answer.DUPLICATE, Answer.DEAD, Answer.EXPIRED, Answer.PASSED_ON}


class SqliteStore:
    """Claims, effects, keys, lanes, ledger on one SQLite file.

    `queue` is the broker on the same file, if there is one: taking a message and claiming it is one
    commit then.
    """

    forgets_claims = False
    """They are not synced, but what takes one back is a power cut, and takes the workers, too."""

    def __init__(
        self,
        path: Path,
        *,
        queue: Transactional | None = None,
        clock: Clock | None = None,
        isolates: bool = True,
        notices: Callable[[str], Notices | None] | None = None,
        subscribers: Subscribers | None = None,
    ) -> None:
        """`notices`: by a subscription's name, who is told of its tasks' ends. `subscribers`: who
        is told of events, by deliveries that are committed with them. `isolates`: somebody starts
        child processes for messages that crashed their workers."""
        self.path = path
        self.clock = clock or SystemClock()
        self._queue = queue
        self._isolates = isolates
        self._notices = notices
        self._subscribers = subscribers
        self._opened: SqliteFile | None = None
        self._listeners: list[events.Listener] = []
        self.expiry_paused = False
        """True while a jump of the clock makes times to live doubtful: nothing expires."""
        self.clock_jumps = 0
        """The worker watches the same clock."""
        self.governed = False
        self.quotas_of: QuotasOf | None = None
        self._fleet = Fleet()

    async def open(self) -> None:
        if self._opened is None:
            file = await asyncio.to_thread(open_file, self.path, self.clock)
            self._ledger = Ledger(file, self._subscribers)
            if self._notices is not None:
                self._ledger.notices = NoticeWriter(
                    self._notices, self._queue, file.wake_after_commit
                )
            self._claims = Claims(self._ledger, self._queue, isolates=self._isolates)
            self._finisher = Finisher(self._ledger, self._queue, file.wake_after_commit)
            self._runs = RunWriter(self._ledger)
            self._roll = Roll(file, self._ledger)
            self._opened = file

    async def close(self) -> None:
        if self._opened is not None:
            file, self._opened = self._opened, None
            self._roll.close()
            await asyncio.to_thread(close_file, file)

    @property
    def file(self) -> SqliteFile:
        if self._opened is None:
            raise StoreUnavailable(f"the store {self.path} is not open")
        return self._opened

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def fused(self) -> bool:
        """Does the broker's queue live in this file?"""
        return self._queue is not None

    # -- workers ----------------------------------------------------------------------------------

    async def register(
        self, name: str, offers: Offers | None = None, *, parent: str | None = None
    ) -> Worker:
        worker = await self._roll.register(name, offers, parent)
        self._fleet.forget()
        return worker

    async def announce(self, worker: Worker, offers: Offers) -> Worker:
        await self._commit(lambda conn: self._roll.announce(conn, worker, offers))
        self._fleet.forget()
        return msgspec.structs.replace(worker, offers=offers)

    async def leave(self, worker: Worker, *, running: bool = False) -> None:
        await self._roll.leave(worker, running=running)

    def beat(self, worker: Worker) -> None:
        self._roll.beat(worker)

    def is_registered(self, worker: Worker) -> bool:
        return self._roll.is_registered(worker)

    async def reap(
        self,
        *,
        worker: Worker,
        lease_s: float,
        crash_budget: int,
        ended: Mapping[str, int] | None = None,
    ) -> Reclaimed:
        if not await self._roll.is_someone_missing(worker, lease_s):
            return Reclaimed()
        found = await self._commit(
            lambda conn: self._roll.reap(conn, worker, lease_s, crash_budget, ended or {})
        )
        self._roll.forget(found.workers)
        self._fleet.forget()
        return found

    async def identity(self) -> str:
        def op(conn: sqlite3.Connection) -> str:
            conn.execute(
                "INSERT OR IGNORE INTO roles (role, state) VALUES ('_store', ?)", (new_id(),)
            )
            found = conn.execute("SELECT state FROM roles WHERE role = '_store'").fetchone()
            return str(found[0])

        return await self.file.write(op, within_s=TURN_WAIT_S)

    # -- claim ------------------------------------------------------------------------------------

    async def take(self, sub: Subscription, decode: Decode, *, limit: int, worker: Worker) -> Taken:
        def op(conn: sqlite3.Connection) -> Taken:
            taken = self._claims.take(self._claiming(conn, sub, worker), decode, limit)
            self._wake_for_next(taken.verdicts)
            return taken

        # Need not be synced, whatever it answers: a power cut that takes a verdict back puts the
        # message back into the queue, which was the same commit.
        return await self._commit(op, durable=False)

    async def claim(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker
    ) -> Sequence[Verdict]:
        def op(conn: sqlite3.Connection) -> list[Verdict]:
            verdicts = self._claims.admit(self._claiming(conn, sub, worker, "broker"), batch)
            if lets_go(verdicts):
                self.file.sync_commit()
                self._wake_for_next(verdicts)
            return verdicts

        # A lost claim of nothing but runs only runs again: the broker still has the messages.
        return await self._commit(op, durable=False)

    async def adopt_in_order(
        self, sub: Subscription, batch: Sequence[Candidate], *, worker: Worker
    ) -> Sequence[Verdict] | None:
        def op(conn: sqlite3.Connection) -> list[Verdict] | None:
            claim = self._claiming(conn, sub, worker)
            if not own_source(conn, sub.name, worker.worker_id):
                return None
            if not batch:  # only asked whether this worker is the one that reads
                return []
            self.file.wake_after_commit()
            return self._claims.adopt_in_order(claim, batch)

        return await self._commit(op, durable=bool(batch))

    async def claim_ready(
        self, sub: Subscription, *, limit: int, worker: Worker, company: Company = Company.ANY
    ) -> Sequence[Verdict]:
        def op(conn: sqlite3.Connection) -> list[Verdict]:
            claim = self._claiming(conn, sub, worker)
            verdicts: list[Verdict] = []
            for priority in _PRIORITIES:
                if len(verdicts) < limit:
                    left = limit - len(verdicts)
                    verdicts += self._claims.claim_ready(claim, priority, left, company)
            self._wake_for_next(verdicts)
            return verdicts

        # Not synced, whatever it answers: the message is in the row that it was in before.
        return await self._commit(op, durable=False)

    def _wake_for_next(self, verdicts: Sequence[Verdict]) -> None:
        """What ended at its claim let go of its key and its lane: the next may be ready now. What
        was passed on is ready for another worker."""
        if not _WAKES.isdisjoint([verdict.answer for verdict in verdicts]):
            self.file.wake_after_commit()

    async def next_due_s(self, sub: Subscription) -> float | None:
        now = self.clock.now_us()
        due = await self.file.read(lambda conn: next_due(Claiming(conn, sub, 0, now, 0)))
        return None if due is None else max(0.0, (due - now) / 1e6)

    def _claiming(
        self, conn: sqlite3.Connection, sub: Subscription, worker: Worker, held: str = "store"
    ) -> Claiming:
        if not is_alive_in(conn, worker.worker_id):
            # Nobody would reap what a dead number claims. The worker registers again, and asks.
            raise StoreUnavailable(f"worker {worker.worker_id} was declared dead; nothing claimed")
        now = self.clock.now_us()
        return Claiming(
            conn,
            sub,
            worker.worker_id,
            now,
            self.expiry_us(now),
            Ahead(now - int(self.clock.monotonic() * 1e6)),
            held,
            worker.name,
            self.governed,
            None if self.quotas_of is None else SqliteQuotaBook(conn, now, self.quotas_of),
            handled_by(worker, sub.name),
            self._fleet,
        )

    def expiry_us(self, now_us: int) -> int:
        """What expires up to here is over: nothing, while the clock is in doubt."""
        doubtful = self.expiry_paused or self.file.clock_in_doubt
        return NOTHING_EXPIRES if doubtful else now_us

    async def adopt(self, batch: Sequence[Run], *, worker: Worker) -> Sequence[bool]:
        def op(conn: sqlite3.Connection) -> list[bool]:
            return [
                conn.execute(
                    "UPDATE queue_executions SET held = 'store', body = ?, body_info = ?,"
                    " body_crc = ? WHERE tenant_id = ? AND subscription = ? AND message_id = ?"
                    " AND worker_id = ? AND epoch = ? AND status = 'running'",
                    (
                        run.body,
                        run_info(run),
                        crc(run.body),
                        run.message.tenant_id,
                        run.subscription,
                        run.message.id,
                        worker.worker_id,
                        run.token.epoch,
                    ),
                ).rowcount
                == 1
                for run in batch
            ]

        return await self.file.write(op)

    # -- finish -----------------------------------------------------------------------------------

    async def finish(self, batch: Sequence[Finished], *, worker: Worker) -> Sequence[Commit]:
        """One transaction for the batch. An item that no row can hold ends as `unstorable`."""
        return await finish_in_halves(batch, lambda some: self._finish(some, worker))

    async def _finish(self, batch: Sequence[Finished], worker: Worker) -> Sequence[Commit]:
        def op(conn: sqlite3.Connection) -> list[Commit]:
            return self._finisher.finish(
                conn, batch, worker_id=worker.worker_id, now_us=self.clock.now_us()
            )

        return await self._commit(op)

    async def resolve(self, *, worker: Worker) -> int:
        """A net: keys and lanes are resolved where they end, inside the same transaction. And
        messages that were parked for an effect which turned out to be done go on."""
        if await self.read(SQL.operations.wait_for_effect):
            await self.write(parked.resume_for_effect, worker_id=worker.worker_id)
        keys, lanes = await self.file.read(_unresolved)
        if not keys and not lanes:
            return 0

        def op(conn: sqlite3.Connection) -> int:
            now = self.clock.now_us()
            entries: list[Entry] = []
            before = conn.total_changes
            for tenant_id, subscription, key in keys:
                entries += resolve_key(conn, tenant_id, subscription, key, now)
            for tenant_id, subscription, lane in lanes:
                advance_lane(conn, tenant_id, subscription, lane, now)
            self._ledger.append(conn, worker.worker_id, entries, now)
            changed = conn.total_changes - before
            if changed:
                self.file.wake_after_commit()
            return changed

        return await self._commit(op)

    async def hold_back(self, send: Send) -> None:
        """A message that is not due yet, for the outbox to publish when it is."""

        def op(conn: sqlite3.Connection) -> None:
            rows.insert(conn, OUTBOX, [outbox_row(send, self.clock.now_us())])
            self.file.wake_after_commit(OUTGOING)

        await self.file.write(op, within_s=TURN_WAIT_S)

    # -- during a run -----------------------------------------------------------------------------

    async def effect_begin(
        self, run: Run, name: str, *, again: bool = False
    ) -> tuple[EffectState, bytes | None]:
        return await self.write_rows(
            lambda conn, now: self._runs.effect_begin(conn, run, name, now, again=again)
        )

    async def effect_done(self, run: Run, name: str, result: bytes, *, again: bool = False) -> None:
        await self.write_rows(
            lambda conn, now: self._runs.effect_done(conn, run, name, result, now, again=again)
        )

    async def effect_raised(self, run: Run, name: str, error: str) -> None:
        await self.write_rows(lambda conn, now: self._runs.effect_raised(conn, run, name, error))

    async def effect_clear(self, run: Run, name: str) -> None:
        await self.write_rows(lambda conn, now: self._runs.effect_clear(conn, run, name))

    async def heartbeat(self, run: Run, data: Mapping[str, Any]) -> None:
        await self.write_rows(lambda conn, now: self._runs.heartbeat(conn, run, data, now))

    async def reply_now(self, run: Run, reply: Reply, n: int) -> str:
        def op(conn: sqlite3.Connection, now_us: int) -> str:
            self.file.wake_after_commit(OUTGOING)
            return self._runs.reply_now(conn, run, reply, n, now_us)

        return await self.write_rows(op)

    # -- relays -----------------------------------------------------------------------------------

    async def to_cancel(self, *, worker: Worker) -> Sequence[tuple[str, str, str]]:
        found = await self.file.read(
            lambda conn: conn.execute(TO_CANCEL, (worker.worker_id,)).fetchall()
        )
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
        now_us = self.clock.now_us()
        values = (msgspec.json.encode(list(subscriptions)).decode(), now_us)
        found = await self.file.read(lambda conn: conn.execute(_SUSPECTS, values).fetchall())
        if found and self._fleet.age_s >= LOOK_S:
            since = now_us - int(GRACE_S * 1e6)
            span = (since, now_us)
            offers = await self.file.read(lambda conn: conn.execute(OFFERS, span).fetchall())
            self._fleet.update(text for (text,) in offers)
        return self._fleet.suspects(worker, found)

    async def paused(self) -> frozenset[str]:
        found = await self.file.read(
            lambda conn: conn.execute(
                "SELECT subscription FROM sources WHERE paused_at IS NOT NULL"
            ).fetchall()
        )
        return frozenset(name for (name,) in found)

    async def is_empty(self, subscriptions: Sequence[str]) -> bool:
        """Nothing waits, runs or is due later (parked messages aside)."""
        return not await self._looked(BUSY, subscriptions)

    async def stuck(self, subscriptions: Sequence[str]) -> int:
        return await self._looked(STUCK, subscriptions)

    async def _looked(self, sql: str, subscriptions: Sequence[str]) -> int:
        marks = msgspec.json.encode(list(subscriptions)).decode()
        return int(await self.file.read(lambda conn: conn.execute(sql, (marks,)).fetchone()[0]))

    async def hold_role(self, role: str, *, worker: Worker) -> bool:
        """A role's lease is its worker's: it is free as soon as that worker is not alive."""

        def op(conn: sqlite3.Connection) -> bool:
            return (
                conn.execute(
                    "INSERT INTO roles (role, worker_id) VALUES (?, ?) ON CONFLICT (role)"
                    " DO UPDATE SET worker_id = excluded.worker_id WHERE roles.worker_id"
                    " = excluded.worker_id OR roles.worker_id IS NULL OR roles.worker_id NOT IN"
                    " (SELECT worker_id FROM workers WHERE state = 'alive') RETURNING 1",
                    (role, worker.worker_id),
                ).fetchone()
                is not None
            )

        return await self.file.write(op, durable=False)

    def on_events(self, listener: events.Listener) -> None:
        self._listeners.append(listener)

    def subscribe(self) -> asyncio.Event:
        return self.file.subscribe()

    def unsubscribe(self, event: asyncio.Event) -> None:
        if self._opened is not None:
            self._opened.unsubscribe(event)

    def look_again(self) -> None:
        """Whoever waits for due work looks now: the clock was moved."""
        if self._opened is not None:
            self._opened._set_waiters(WORK + OUTGOING)

    # -- the transaction --------------------------------------------------------------------------

    async def read(self, statement: str, *values: Any) -> list[Row]:
        """One statement by itself."""
        return await self.file.read(
            lambda conn: conn.execute(statement, parameters(values)).fetchall()
        )

    async def write(
        self,
        op: Operation[T],
        *,
        worker_id: int,
        durable: bool = True,
        within_s: float | None = None,
    ) -> T:
        """One transaction, or a part of one that others share; see `UnitOfWork.write`."""

        def run(conn: sqlite3.Connection) -> T:
            tx, change = SqliteTx(conn, self.clock.now_us()), Change()
            result = run_now(op(tx, change))
            self._conclude(tx, change, worker_id)
            return result

        return await self._commit(run, durable=durable, within_s=within_s)

    async def write_once(self, op: Operation[T], *, worker_id: int) -> T:
        return await self.write(op, worker_id=worker_id, within_s=TURN_WAIT_S)

    def _conclude(self, tx: SqliteTx, change: Change, worker_id: int) -> None:
        """What every change does before its commit, and asks for after it."""
        conn, now_us = tx.conn, tx.now_us
        for tenant_id, subscription, key in sorted(change.keys):
            change.entries += resolve_key(conn, tenant_id, subscription, key, now_us)
        for tenant_id, subscription, lane in sorted(change.lanes):
            advance_lane(conn, tenant_id, subscription, lane, now_us)
        self._publish(conn, change, now_us)
        self._ledger.append(conn, worker_id, change.entries, now_us, told=change.told)
        for topic in change.topics:
            self.file.wake_after_commit(topic.encode())

    def _publish(self, conn: sqlite3.Connection, change: Change, now_us: int) -> None:
        if not change.sends:
            return
        if self._queue is None:
            rows.insert(conn, OUTBOX, [outbox_row(send, now_us) for send in change.sends])
            change.topics.add(OUTGOING_TOPIC)
            return
        for queue in dict.fromkeys(send.queue for send in change.sends):
            batch = [send.outgoing for send in change.sends if send.queue == queue]
            self._queue.publish_in(conn, queue, batch)

    async def write_rows(
        self, op: Callable[[sqlite3.Connection, int], T], *, within_s: float | None = None
    ) -> T:
        """One durable operation, given the time of now; listeners hear what it told the ledger."""
        return await self._commit(lambda conn: op(conn, self.clock.now_us()), within_s=within_s)

    async def _commit(self, op: Op[T], *, durable: bool = True, within_s: float | None = None) -> T:
        """One operation; what it wrote into the ledger is told once it is committed."""
        if not self._listeners:
            return await self.file.write(op, durable=durable, within_s=within_s)
        heard: list[Entry] = []

        def listening(conn: sqlite3.Connection) -> T:
            heard.clear()  # it may be undone and run again
            self._ledger.heard = heard
            try:
                return op(conn)
            finally:
                self._ledger.heard = None

        result = await self.file.write(listening, durable=durable, within_s=within_s)
        if heard:
            for listener in self._listeners:
                listener(heard)
        return result


def _unresolved(conn: sqlite3.Connection) -> tuple[list[Any], list[Any]]:
    """Keys that are over while others wait for them; lanes whose first message only waits."""
    keys = conn.execute(
        "SELECT DISTINCT w.tenant_id, w.subscription, w.idem_key FROM queue_executions w"
        " LEFT JOIN idempotency_keys k ON k.tenant_id = w.tenant_id"
        " AND k.subscription = w.subscription AND k.key = w.idem_key"
        " WHERE w.status = 'waiting_key' AND (k.state IS NULL OR k.state = 'done')"
    ).fetchall()
    lanes = conn.execute(
        "SELECT tenant_id, subscription, lane FROM (SELECT tenant_id, subscription, lane, status,"
        f" min(lane_seq) FROM queue_executions WHERE {UNENDED}"
        " AND lane IS NOT NULL GROUP BY tenant_id, subscription, lane) WHERE status = 'queued'"
    ).fetchall()
    return keys, lanes
