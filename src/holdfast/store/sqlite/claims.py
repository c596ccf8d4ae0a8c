"""Claims: which worker may run which message. One transaction per batch, one verdict per item.

Why it holds: a row gets into `running` only through a compare-and-set here, under the one write
lock of the file, and the pair (worker_id, epoch) on it is new each time. An idempotency key belongs
to one message until that message is final.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core import events
from holdfast.core.broker import Subscription, Transactional
from holdfast.core.clock import to_us
from holdfast.core.errors import DecodeError, StoreCorrupt
from holdfast.core.ids import derived_id, task_uuid
from holdfast.core.message import DEFAULT_TENANT, Message
from holdfast.core.outcome import FINAL, SEED_WORDS, Status
from holdfast.core.store import Answer, Candidate, Decode, Run, Taken, Token, Verdict
from holdfast.sqlite import rows

from . import tasks
from .ledger import Entry, Ledger
from .letters import Letter, bury, storable

LANE_CHUNK = 200
"""Keyed messages taken into their lanes at a time."""
_PRIORITIES = (3, 2, 1, 0)
_DUE = "subscription = ? AND status = 'ready' AND priority = ? AND due_at <= ?"
_HEAD = (
    "(a.lane IS NULL OR NOT EXISTS (SELECT 1 FROM queue_executions b"
    " WHERE b.tenant_id = a.tenant_id AND b.subscription = a.subscription AND b.lane = a.lane"
    f" AND b.lane_seq < a.lane_seq AND b.status NOT IN {tasks.FINAL_WORDS}))"
)
_DUE_PRIORITIES = " UNION ALL ".join(
    f"SELECT {p} WHERE EXISTS (SELECT 1 FROM queue_executions WHERE subscription = ?1"
    f" AND status = 'ready' AND priority = {p} AND due_at <= ?2)"
    for p in _PRIORITIES
)
_NEXT_DUE = " UNION ALL ".join(
    f"SELECT min(due_at) FROM queue_executions WHERE subscription = ?1"
    f" AND status = 'ready' AND priority = {p} AND due_at > ?2"
    for p in _PRIORITIES
)
CLAIM_READY = (
    "UPDATE queue_executions SET status = 'running', worker_id = ?, epoch = epoch + 1,"
    " attempt = attempt + 1 WHERE rowid IN (SELECT rowid FROM queue_executions a"
    f" WHERE {_DUE} AND crashes BETWEEN ? AND ? AND {_HEAD} ORDER BY due_at LIMIT ?)"
    f" RETURNING {tasks.RUN_COLUMNS}"
)
LANE_BUSY = (
    "SELECT 1 FROM queue_executions WHERE tenant_id = ? AND subscription = ? AND lane = ?"
    f" AND status NOT IN {tasks.FINAL_WORDS} LIMIT 1"
)
_MANY = 1_000_000


class _Fresh(NamedTuple):
    at: int
    candidate: Candidate
    message: Message
    rowid: int


class _Existing(NamedTuple):
    rowid: int
    status: str
    held: str
    sha256: bytes
    epoch: int
    attempt: int
    crashes: int


class Claims:
    """The claim half of the protocol. All methods run inside a transaction of the writer thread."""

    def __init__(self, ledger: Ledger, queue: Transactional | None, *, suspect_at: int) -> None:
        self._ledger = ledger
        self._queue = queue
        self._suspect_at = suspect_at
        """Crashes after which a message runs alone."""

    # -- one file: receive + claim ----------------------------------------------------------------

    def take(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        decode: Decode,
        *,
        limit: int,
        worker_id: int,
        now_us: int,
        expiry_us: int,
    ) -> Taken:
        """Due work of the store and new messages of the queue, the highest priority first."""
        queue = self._queue
        if queue is None:
            raise StoreCorrupt("take() needs a queue in the same file")
        queue_due = queue.promote_in(conn, now_us)
        if sub.ordered:
            self._fill_lanes(conn, sub, decode, limit=limit, worker_id=worker_id, now_us=now_us)
        verdicts: list[Verdict] = []
        held = [p for (p,) in conn.execute(_DUE_PRIORITIES, (sub.name, now_us))]
        for floor in (*held, 0) if held != [] and held[-1] != 0 else (held or (0,)):
            if floor in held:
                verdicts += self.claim_ready(
                    conn,
                    sub,
                    limit=limit - len(verdicts),
                    worker_id=worker_id,
                    now_us=now_us,
                    expiry_us=expiry_us,
                    priority=floor,
                )
            if len(verdicts) >= limit:
                break
            new = queue.take_in(conn, sub, limit=limit - len(verdicts), keyed=False, floor=floor)
            verdicts += self.admit(
                conn,
                sub,
                [decode(delivery) for delivery in new],
                worker_id=worker_id,
                held="store",
                now_us=now_us,
                expiry_us=expiry_us,
            )
            if len(verdicts) >= limit:
                break
        next_due_s = None
        if len(verdicts) < limit:
            waits = [due for due in (next_due(conn, sub.name, now_us), queue_due) if due]
            next_due_s = (min(waits) - now_us) / 1e6 if waits else None
        return Taken(verdicts=verdicts, next_due_s=next_due_s)

    def _fill_lanes(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        decode: Decode,
        *,
        limit: int,
        worker_id: int,
        now_us: int,
    ) -> None:
        """Move keyed messages, in the order sent, into their lanes until enough heads stand ready."""
        queue = self._queue
        assert queue is not None  # noqa: S101 - take() has checked
        while True:
            (heads,) = conn.execute(
                "SELECT count(*) FROM (SELECT 1 FROM queue_executions WHERE subscription = ?"
                " AND status = 'ready' AND lane IS NOT NULL LIMIT ?)",
                (sub.name, limit),
            ).fetchone()
            if heads >= limit:
                return
            taken = queue.take_in(conn, sub, limit=LANE_CHUNK, keyed=True, floor=0)
            if not taken:
                return
            self.adopt_in_order(
                conn, sub, [decode(d) for d in taken], worker_id=worker_id, now_us=now_us
            )

    def adopt_in_order(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        candidates: Sequence[Candidate],
        *,
        worker_id: int,
        now_us: int,
    ) -> list[Verdict]:
        """Write a batch, in broker order, behind what its conversations already hold."""
        self_rowid = _max_rowid(conn)
        (lane_seq,) = conn.execute(
            "INSERT INTO sources (subscription, n) VALUES (?, ?) ON CONFLICT (subscription, part)"
            " DO UPDATE SET n = n + excluded.n RETURNING n",
            (sub.name, len(candidates)),
        ).fetchone()
        lane_seq -= len(candidates)
        busy: dict[tuple[str, str], bool] = {}
        verdicts: list[Verdict] = []
        for candidate in candidates:
            message = candidate.message
            if message is None or message.ordering_key is None:
                verdicts += self.admit(
                    conn,
                    sub,
                    [candidate],
                    worker_id=worker_id,
                    held="store",
                    now_us=now_us,
                    expiry_us=0,
                    ready=True,
                )
                self_rowid = _max_rowid(conn)
                continue
            lane = (message.tenant_id, message.ordering_key)
            if lane not in busy:
                found = conn.execute(LANE_BUSY, (lane[0], sub.name, lane[1])).fetchone()
                busy[lane] = found is not None
            lane_seq += 1
            self_rowid += 1
            values = tasks.row(
                candidate,
                message,
                sub,
                rowid=self_rowid,
                status=Status.QUEUED if busy[lane] else Status.READY,
                held="store",
                worker_id=None,
                claimed=0,
                lane=message.ordering_key,
                lane_seq=lane_seq,
                now_us=now_us,
            )
            if rows.insert(conn, tasks.INSERT, [values]) == 1:
                busy[lane] = True
                verdicts.append(Verdict(answer=Answer.WAITING, delivery=candidate.delivery))
            else:
                verdicts.append(
                    self._known(conn, sub, candidate, message, worker_id, "store", now_us)
                )
        return verdicts

    # -- broker copies ----------------------------------------------------------------------------

    def admit(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        candidates: Sequence[Candidate],
        *,
        worker_id: int,
        held: str,
        now_us: int,
        expiry_us: int,
        ready: bool = False,
    ) -> list[Verdict]:
        """Claim what is new; say of the rest what it is. `ready` keeps it for later instead."""
        verdicts: list[Verdict | None] = [None] * len(candidates)
        rowid = _max_rowid(conn)
        fresh: list[_Fresh] = []
        values: list[tuple[Any, ...]] = []
        seen: set[tuple[str, str]] = set()
        again: list[tuple[int, Candidate, Message]] = []
        for at, candidate in enumerate(candidates):
            message = candidate.message
            if message is None:
                verdicts[at] = self._undecodable(conn, sub, candidate, worker_id, now_us)
                continue
            identity = (message.tenant_id, message.id)
            if identity in seen:
                again.append((at, candidate, message))
                continue
            seen.add(identity)
            rowid += 1
            fresh.append(_Fresh(at, candidate, message, rowid))
            values.append(
                tasks.row(
                    candidate,
                    message,
                    sub,
                    rowid=rowid,
                    status=Status.READY if ready else Status.RUNNING,
                    held=held,
                    worker_id=None if ready else worker_id,
                    claimed=0 if ready else 1,
                    lane=None,
                    lane_seq=None,
                    now_us=now_us,
                )
            )
        if rows.insert(conn, tasks.INSERT, values) != len(values):
            fresh = self._sort_out(conn, sub, fresh, verdicts, worker_id, held, now_us)
        granted = self._granted(
            conn, sub, fresh, verdicts, worker_id, held, now_us, expiry_us, ready
        )
        self._ledger.append(conn, worker_id, [_claimed(sub, run) for run in granted], now_us)
        for at, candidate, message in again:
            verdicts[at] = self._known(conn, sub, candidate, message, worker_id, held, now_us)
        return [verdict for verdict in verdicts if verdict is not None]

    def _granted(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        fresh: Sequence[_Fresh],
        verdicts: list[Verdict | None],
        worker_id: int,
        held: str,
        now_us: int,
        expiry_us: int,
        ready: bool,
    ) -> list[Run]:
        """Runs for new rows, less those that are over time or wait for a key."""
        token = Token(worker_id, 1)
        keys = [
            (item.message.tenant_id, key, item.message.id)
            for item in fresh
            if (key := tasks.idem_key(sub, item.message)) is not None
        ]
        lost = self._take_keys(conn, sub, keys, now_us, expiry_us) if keys and not ready else {}
        runs: list[Run] = []
        for item in fresh:
            delivery, message = item.candidate.delivery, item.message
            expires = tasks.expires_us(delivery, message)
            if expires is not None and expires <= expiry_us:
                self._expire(conn, sub, item, worker_id, now_us)
                verdicts[item.at] = Verdict(answer=Answer.EXPIRED, delivery=delivery)
                continue
            if ready:
                verdicts[item.at] = Verdict(answer=Answer.WAITING, delivery=delivery)
                continue
            holder = lost.get((message.tenant_id, message.id))
            if holder is not None:
                answer = self._lost_key(
                    conn, sub, item.rowid, message, holder, item.candidate, worker_id, now_us
                )
                verdicts[item.at] = Verdict(answer=answer, delivery=delivery)
                continue
            run = Run(
                subscription=sub.name,
                queue=sub.queue,
                idem_key=tasks.idem_key(sub, message),
                message=message,
                token=token,
                attempt=1,
                crashes=0,
                claimed_at_us=now_us,
                row=item.rowid,
                delivery=delivery if held == "broker" else None,
                body=delivery.body,
                body_info=tasks.body_info(item.candidate),
            )
            runs.append(run)
            verdicts[item.at] = Verdict(answer=Answer.RUN, run=run, delivery=delivery)
        return runs

    def _sort_out(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        fresh: Sequence[_Fresh],
        verdicts: list[Verdict | None],
        worker_id: int,
        held: str,
        now_us: int,
    ) -> list[_Fresh]:
        """Some rows were there before: keep the new ones, answer for the others."""
        new: list[_Fresh] = []
        for item in fresh:
            existing = _existing(conn, sub, item.message)
            if existing is not None and existing.rowid == item.rowid:
                new.append(item)
            else:
                verdicts[item.at] = self._known(
                    conn, sub, item.candidate, item.message, worker_id, held, now_us
                )
        return new

    def _known(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        candidate: Candidate,
        message: Message,
        worker_id: int,
        held: str,
        now_us: int,
    ) -> Verdict:
        """A copy of a task that exists already."""
        delivery = candidate.delivery
        row = _existing(conn, sub, message)
        if row is None:
            raise StoreCorrupt(f"task {message.id} vanished inside its own transaction")
        if row.sha256 != candidate.sha256:
            self._conflict(conn, sub, candidate, message, worker_id, now_us)
            return Verdict(answer=Answer.DEAD, delivery=delivery)
        if row.status in FINAL:
            return Verdict(answer=Answer.FINAL, delivery=delivery)
        if row.status == Status.OPEN:
            return self._reopen(conn, sub, candidate, message, row, worker_id, held, now_us)
        if row.held == "broker":
            self._hold(conn, row.rowid, candidate)
            return Verdict(answer=Answer.ADOPTED, delivery=delivery)
        return Verdict(answer=Answer.WAITING, delivery=delivery)

    def _reopen(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        candidate: Candidate,
        message: Message,
        row: _Existing,
        worker_id: int,
        held: str,
        now_us: int,
    ) -> Verdict:
        """The broker brings back a task whose worker died: claim it, or keep it if it is suspect."""
        delivery = candidate.delivery
        if row.crashes >= self._suspect_at:
            self._hold(conn, row.rowid, candidate)
            conn.execute(
                "UPDATE queue_executions SET status = 'ready', due_at = ? WHERE rowid = ?",
                (now_us, row.rowid),
            )
            return Verdict(answer=Answer.WAITING, delivery=delivery)
        conn.execute(
            "UPDATE queue_executions SET status = 'running', worker_id = ?, epoch = epoch + 1,"
            " attempt = attempt + 1 WHERE rowid = ? AND status = 'open'",
            (worker_id, row.rowid),
        )
        if held == "store":
            self._hold(conn, row.rowid, candidate)
        run = Run(
            subscription=sub.name,
            queue=sub.queue,
            idem_key=tasks.idem_key(sub, message),
            message=msgspec.structs.replace(message, attempt=row.attempt + 1),
            token=Token(worker_id, row.epoch + 1),
            attempt=row.attempt + 1,
            crashes=row.crashes,
            claimed_at_us=now_us,
            row=row.rowid,
            delivery=delivery if held == "broker" else None,
            body=delivery.body,
            body_info=tasks.body_info(candidate),
        )
        self._ledger.append(conn, worker_id, [_claimed(sub, run)], now_us)
        return Verdict(answer=Answer.RUN, run=run, delivery=delivery)

    def _hold(self, conn: sqlite3.Connection, rowid: int, candidate: Candidate) -> None:
        """Adopt: the row takes the whole message, so that its broker copy may go."""
        body = candidate.delivery.body
        conn.execute(
            "UPDATE queue_executions SET held = 'store', body = ?, body_info = ?, body_crc = ?"
            " WHERE rowid = ? AND held = 'broker'",
            (body, tasks.body_info(candidate), zlib.crc32(body), rowid),
        )

    # -- what the store holds ---------------------------------------------------------------------

    def claim_ready(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        *,
        limit: int,
        worker_id: int,
        now_us: int,
        expiry_us: int,
        priority: int,
        solo: bool = False,
    ) -> list[Verdict]:
        """Due tasks of one priority: retries, resumed, adopted, lane heads."""
        low, high = (self._suspect_at, _MANY) if solo else (0, self._suspect_at - 1)
        found = conn.execute(
            CLAIM_READY, (worker_id, sub.name, priority, now_us, low, high, limit)
        ).fetchall()
        if not found:
            return []
        keyed = [(row[1], row[8], row[2]) for row in found if row[8] is not None]
        lost = self._take_keys(conn, sub, keyed, now_us, expiry_us) if keyed else {}
        verdicts: list[Verdict] = []
        runs: list[Run] = []
        for row in found:
            try:
                run = tasks.run_of_row(sub, row, worker_id=worker_id, now_us=now_us)
            except (StoreCorrupt, DecodeError) as error:
                self._unreadable(conn, sub, row, error, worker_id, now_us)
                verdicts.append(Verdict(answer=Answer.DEAD))
                continue
            expires = row[9]
            if expires is not None and expires <= expiry_us:
                self._expire_run(conn, sub, run, worker_id, now_us)
                verdicts.append(Verdict(answer=Answer.EXPIRED))
                continue
            holder = lost.get((run.message.tenant_id, run.message.id))
            if holder is not None:
                answer = self._lost_key(
                    conn, sub, run.row, run.message, holder, None, worker_id, now_us
                )
                verdicts.append(Verdict(answer=answer))
                continue
            runs.append(run)
            verdicts.append(Verdict(answer=Answer.RUN, run=run))
        self._ledger.append(conn, worker_id, [_claimed(sub, run) for run in runs], now_us)
        return verdicts

    # -- idempotency keys -------------------------------------------------------------------------

    def _take_keys(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        wanted: Sequence[tuple[str, str, str]],
        now_us: int,
        expiry_us: int,
    ) -> dict[tuple[str, str], tuple[str, str, bytes | None]]:
        """Take (tenant, key, message) keys; returns those lost: who holds it, its state, its value."""
        inserted = rows.insert(
            conn,
            "INSERT OR IGNORE INTO idempotency_keys (tenant_id, subscription, key, message_id,"
            " state, created_at)",
            [(tenant, sub.name, key, mid, "running", now_us) for tenant, key, mid in wanted],
        )
        lost: dict[tuple[str, str], tuple[str, str, bytes | None]] = {}
        if inserted == len(wanted):
            return lost
        for tenant, key, message_id in wanted:
            holder, state, value, expires = conn.execute(
                "SELECT message_id, state, value, expires_at FROM idempotency_keys"
                " WHERE tenant_id = ? AND subscription = ? AND key = ?",
                (tenant, sub.name, key),
            ).fetchone()
            if holder == message_id:
                continue
            if state == "done" and expires is not None and expires <= expiry_us:
                conn.execute(
                    "UPDATE idempotency_keys SET message_id = ?, state = 'running', value = NULL,"
                    " expires_at = NULL WHERE tenant_id = ? AND subscription = ? AND key = ?",
                    (message_id, tenant, sub.name, key),
                )
                continue
            lost[(tenant, message_id)] = (holder, state, value)
        return lost

    def _lost_key(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        rowid: int,
        message: Message,
        holder: tuple[str, str, bytes | None],
        candidate: Candidate | None,
        worker_id: int,
        now_us: int,
    ) -> Answer:
        """Its key belongs to another message: a duplicate if that one is done, else it waits."""
        first_id, state, value = holder
        if state == "done":
            entry = end_as_duplicate(
                conn, sub.name, sub.queue, rowid, message, first_id, value, now_us
            )
            self._ledger.append(conn, worker_id, [entry], now_us)
            return Answer.DUPLICATE
        if candidate is not None:
            self._hold(conn, rowid, candidate)
        conn.execute(
            "UPDATE queue_executions SET status = 'waiting_key', worker_id = NULL,"
            " attempt = attempt - 1 WHERE rowid = ?",
            (rowid,),
        )
        return Answer.WAITING

    # -- ends at the claim ------------------------------------------------------------------------

    def _undecodable(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        candidate: Candidate,
        worker_id: int,
        now_us: int,
    ) -> Verdict:
        """C0: straight to the dead letters, with its bytes."""
        delivery = candidate.delivery
        identity = delivery.identity or derived_id(sub.queue, delivery.body.hex())
        self._dead_on_arrival(
            conn,
            sub,
            candidate,
            tenant_id=sub.tenant or DEFAULT_TENANT,
            message_id=identity,
            event_name=None,
            reason="undecodable",
            error=str(candidate.error),
            worker_id=worker_id,
            now_us=now_us,
        )
        return Verdict(answer=Answer.DEAD, delivery=delivery)

    def _conflict(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        candidate: Candidate,
        message: Message,
        worker_id: int,
        now_us: int,
    ) -> None:
        """The same id with another payload: kept under an id of its own."""
        self._dead_on_arrival(
            conn,
            sub,
            candidate,
            tenant_id=message.tenant_id,
            message_id=derived_id(message.id, candidate.sha256.hex()),
            event_name=message.type,
            reason="id_conflict",
            error=f"message id {message.id} was used before, with another payload",
            worker_id=worker_id,
            now_us=now_us,
        )

    def _dead_on_arrival(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        candidate: Candidate,
        *,
        tenant_id: str,
        message_id: str,
        event_name: str | None,
        reason: str,
        error: str,
        worker_id: int,
        now_us: int,
    ) -> None:
        inserted = conn.execute(
            "INSERT OR IGNORE INTO queue_executions (id, tenant_id, subscription, message_id,"
            " queue_name, event_name, status, held, worker_id, started_at, completed_at,"
            " error_message, body_sha256) VALUES (?, ?, ?, ?, ?, ?, 'failed', 'store', ?, ?, ?, ?, ?)",
            (
                task_uuid(tenant_id, sub.name, message_id),
                tenant_id,
                sub.name,
                message_id,
                sub.queue,
                event_name,
                worker_id,
                now_us,
                now_us,
                storable(error),
                candidate.sha256,
            ),
        ).rowcount
        if not inserted:
            return  # a further copy of what was dead-lettered before
        letter = Letter(
            tenant_id=tenant_id,
            subscription=sub.name,
            message_id=message_id,
            queue=sub.queue,
            event_name=event_name,
            reason=reason,
            error=error,
            body=candidate.delivery.body,
            body_info=tasks.body_info(candidate),
        )
        final = final_data(
            sub.queue, tenant_id, message_id, event_name, f"queue-{message_id}", Status.FAILED
        )
        final.update(reason=reason, error=storable(error))
        self._ledger.append(
            conn,
            worker_id,
            [
                (tenant_id, sub.name, message_id, events.FAILED, final),
                bury(conn, letter, now_us),
            ],
            now_us,
        )

    def _unreadable(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        row: Sequence[Any],
        error: Exception,
        worker_id: int,
        now_us: int,
    ) -> None:
        """A stored body that is not what was written: never run, kept as it is."""
        rowid, tenant_id, message_id = row[0], row[1], row[2]
        body, info = row[-3], row[-2]
        conn.execute(
            "UPDATE queue_executions SET status = 'failed', completed_at = ?, error_message = ?,"
            " body = NULL WHERE rowid = ?",
            (now_us, storable(str(error)), rowid),
        )
        letter = Letter(
            tenant_id=tenant_id,
            subscription=sub.name,
            message_id=message_id,
            queue=sub.queue,
            event_name=None,
            reason="body_corrupt",
            error=str(error),
            body=body,
            body_info=info,
        )
        final = final_data(
            sub.queue, tenant_id, message_id, None, f"queue-{message_id}", Status.FAILED
        )
        final.update(reason="body_corrupt", error=storable(str(error)))
        free_key(conn, tenant_id, sub.name, row[8], message_id)
        self._ledger.append(
            conn,
            worker_id,
            [
                (tenant_id, sub.name, message_id, events.FAILED, final),
                bury(conn, letter, now_us),
            ],
            now_us,
        )

    def _expire(
        self,
        conn: sqlite3.Connection,
        sub: Subscription,
        item: _Fresh,
        worker_id: int,
        now_us: int,
    ) -> None:
        run = Run(
            subscription=sub.name,
            queue=sub.queue,
            message=item.message,
            token=Token(worker_id, 1),
            attempt=1,
            crashes=0,
            claimed_at_us=now_us,
            row=item.rowid,
            body=item.candidate.delivery.body,
            body_info=tasks.body_info(item.candidate),
        )
        self._expire_run(conn, sub, run, worker_id, now_us)

    def _expire_run(
        self, conn: sqlite3.Connection, sub: Subscription, run: Run, worker_id: int, now_us: int
    ) -> None:
        conn.execute(
            "UPDATE queue_executions SET status = 'expired', completed_at = ?, body = NULL,"
            " error_message = 'expired before it could run' WHERE rowid = ?",
            (now_us, run.row),
        )
        message = run.message
        letter = letter_of(
            run, sub.queue, "expired", "its time to live was over before it could run"
        )
        final = final_data(
            sub.queue, message.tenant_id, message.id, message.type, message.trace_id, Status.EXPIRED
        )
        free_key(conn, message.tenant_id, sub.name, tasks.idem_key(sub, message), message.id)
        self._ledger.append(
            conn,
            worker_id,
            [
                (message.tenant_id, sub.name, message.id, events.EXPIRED, final),
                bury(conn, letter, now_us),
            ],
            now_us,
        )


def next_due(conn: sqlite3.Connection, subscription: str, now_us: int) -> int | None:
    """When the next task that waits in the store is due."""
    found = [due for (due,) in conn.execute(_NEXT_DUE, (subscription, now_us)) if due is not None]
    return min(found) if found else None


def end_as_duplicate(
    conn: sqlite3.Connection,
    subscription: str,
    queue: str,
    rowid: int,
    message: Message | None,
    first_id: str,
    value: bytes | None,
    now_us: int,
    *,
    tenant_id: str = "",
    message_id: str = "",
) -> Entry:
    """End a task as duplicate of `first_id`, with the first one's result."""
    if message is not None:
        tenant_id, message_id = message.tenant_id, message.id
    conn.execute(
        "UPDATE queue_executions SET status = 'duplicate', completed_at = ?, result = ?,"
        " body = NULL, body_info = NULL WHERE rowid = ?",
        (now_us, value, rowid),
    )
    trace_id = message.trace_id if message is not None else f"queue-{message_id}"
    data = final_data(
        queue,
        tenant_id,
        message_id,
        message.type if message is not None else None,
        trace_id,
        Status.DUPLICATE,
    )
    data["first_id"] = first_id
    return tenant_id, subscription, message_id, events.DUPLICATE, data


def free_key(
    conn: sqlite3.Connection, tenant_id: str, subscription: str, key: str | None, message_id: str
) -> None:
    """A message that ended badly gives its idempotency key back."""
    if key is not None:
        conn.execute(
            "DELETE FROM idempotency_keys WHERE tenant_id = ? AND subscription = ? AND key = ?"
            " AND message_id = ?",
            (tenant_id, subscription, key, message_id),
        )


def letter_of(run: Run, queue: str, reason: str, error: str) -> Letter:
    """The dead letter of a claimed message."""
    message = run.message
    return Letter(
        tenant_id=message.tenant_id,
        subscription=run.subscription,
        message_id=message.id,
        queue=queue,
        event_name=message.type,
        reason=reason,
        error=error,
        retry_count=max(0, run.failures),
        history=run.history,
        body=run.body,
        body_info=run.body_info,
    )


def final_data(
    queue: str,
    tenant_id: str,
    message_id: str,
    event_name: str | None,
    trace_id: str,
    status: Status,
) -> dict[str, Any]:
    """What every final event's data holds."""
    return {
        "trace_id": trace_id,
        "message_id": message_id,
        "queue": queue,
        "event_name": event_name,
        "tenant_id": tenant_id,
        "status": SEED_WORDS[status],
        "duration_ms": 0,
        "agent_run_id": None,
    }


def _claimed(sub: Subscription, run: Run) -> Entry:
    message = run.message
    data = {"attempt": run.attempt, "created_at": to_us(message.created_at)}
    return message.tenant_id, sub.name, message.id, events.CLAIMED, data


def _existing(conn: sqlite3.Connection, sub: Subscription, message: Message) -> _Existing | None:
    found = conn.execute(
        "SELECT rowid, status, held, body_sha256, epoch, attempt, crashes FROM queue_executions"
        " WHERE tenant_id = ? AND subscription = ? AND message_id = ?",
        (message.tenant_id, sub.name, message.id),
    ).fetchone()
    return None if found is None else _Existing(*found)


def _max_rowid(conn: sqlite3.Connection) -> int:
    found: int | None = conn.execute("SELECT max(rowid) FROM queue_executions").fetchone()[0]
    return found or 0
