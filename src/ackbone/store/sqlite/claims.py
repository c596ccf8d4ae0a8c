"""Claims: which worker may run which message. One transaction per batch, one verdict per item.

Why it holds: a row gets into `running` only through a compare-and-set here, under the one write
lock of the file, and the pair (worker_id, epoch) on it is new each time. An idempotency key belongs
to one message until that message is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ackbone.core.broker import Transactional
from ackbone.core.clock import to_us
from ackbone.core.errors import DecodeError, StoreCorrupt
from ackbone.core.ids import uuid7_block
from ackbone.core.message import Message
from ackbone.core.outcome import FINAL, Status
from ackbone.core.store import (
    Answer,
    Approved,
    Candidate,
    Company,
    Decode,
    Run,
    Taken,
    Token,
    Verdict,
)
from ackbone.sqlite import rows
from ackbone.store.claimed import TASK, claimed, created, failed_elsewhere
from ackbone.store.crash import crashes_of
from ackbone.store.outcomes import final_data
from ackbone.store.quota_book import PutOff
from ackbone.store.stored import ENDED, decode_history, expires_us, none_of, what_differs

from . import ends, tasks
from .approvals import approved_of
from .claim_entries import pass_on, put_off, reclaim
from .claiming import Claiming
from .keys import Holder, end_as_duplicate, is_free, resolve_key, take_keys
from .lanes import append_to_lanes, ready_heads
from .ledger import Entry, Ledger

LANE_CHUNK = 200
"""Keyed messages taken into their lanes at a time."""
LANE_CHUNKS = 5
"""So often at most in one transaction."""
_PRIORITIES = (3, 2, 1, 0)
FIRST_DUE = " UNION ALL ".join(
    f"SELECT {p}, min(due_at) FROM queue_executions WHERE subscription = ?1"
    f" AND status = 'ready' AND priority = {p}"
    for p in _PRIORITIES
)
NEXT_DUE = " UNION ALL ".join(
    f"SELECT min(due_at) FROM queue_executions WHERE subscription = ?1"
    f" AND status = 'ready' AND priority = {p} AND due_at > ?2"
    for p in _PRIORITIES
)
_HEAD = (
    "(a.lane IS NULL OR NOT EXISTS (SELECT 1 FROM queue_executions b"
    " WHERE b.tenant_id = a.tenant_id AND b.subscription = a.subscription AND b.lane = a.lane"
    f" AND b.lane_seq < a.lane_seq AND {none_of(*ENDED, column='b.status')}))"
)
CLAIM_READY = {
    rule: "UPDATE queue_executions SET status = 'running', worker_id = ?1, epoch = epoch + 1,"
    " attempt = attempt + 1 WHERE rowid IN (SELECT rowid FROM queue_executions a"
    " WHERE subscription = ?2 AND status = 'ready' AND priority = ?3 AND due_at <= ?4"
    f" AND crashes BETWEEN ?5 AND ?6{chosen} AND {_HEAD} ORDER BY due_at LIMIT ?7)"
    f" RETURNING {tasks.RUN_COLUMNS}"
    for rule, chosen in tasks.chosen(8).items()
}
REOPEN = (
    "UPDATE queue_executions SET status = 'running', worker_id = ?, epoch = epoch + 1,"
    " attempt = attempt + 1 WHERE rowid = ? AND status = 'open'"
)

_New = tuple[int, tasks.Task]
"""A candidate that gets a row, and its place in the batch."""


class Claims:
    """The claim half of the protocol. Runs inside a transaction of the writer thread."""

    def __init__(self, ledger: Ledger, queue: Transactional | None, *, isolates: bool) -> None:
        self._ledger = ledger
        self._queue = queue
        self._isolates = isolates
        """Messages that crashed their workers run in child processes."""

    # -- one file: receive + claim ----------------------------------------------------------------

    def take(self, claim: Claiming, decode: Decode, limit: int) -> Taken:
        """Due work of the store and new messages of the queue, the highest priority first."""
        queue = self._queue
        if queue is None:
            raise StoreCorrupt("taking from the queue needs a queue in the same file")
        conn, sub = claim.conn, claim.sub
        queue_due = queue.promote_in(conn, claim.now_us)
        verdicts: list[Verdict] = []
        more_keyed = False
        if sub.ordered:
            more_keyed = self._fill_lanes(claim, queue, decode, limit)
        else:  # half of the room: neither those with a key nor those without starve the others
            verdicts += self._take_keyed(claim, queue, decode, (limit + 1) // 2)
        first = [(p, at) for p, at in conn.execute(FIRST_DUE, (sub.name,)) if at is not None]
        due = [p for p, at in first if at <= claim.now_us]
        for priority in due:  # what is new and above it goes first, then what waited here
            verdicts += self._take_new(claim, queue, decode, limit - len(verdicts), priority + 1)
            verdicts += self.claim_ready(claim, priority, limit - len(verdicts))
        verdicts += self._take_new(claim, queue, decode, limit - len(verdicts), 0)
        if len(verdicts) < limit and not sub.ordered:
            verdicts += self._take_keyed(claim, queue, decode, limit - len(verdicts))
        next_due_s = None
        if len(verdicts) < limit:
            later = next_due(claim) if due else min((at for _, at in first), default=None)
            waits = [at for at in (later, queue_due) if at is not None]
            next_due_s = (min(waits) - claim.now_us) / 1e6 if waits else None
            next_due_s = 0.0 if more_keyed else next_due_s
        return Taken(verdicts=verdicts, next_due_s=next_due_s)

    def _take_new(
        self, claim: Claiming, queue: Transactional, decode: Decode, limit: int, floor: int
    ) -> list[Verdict]:
        """New messages without an ordering key, none below the priority `floor`."""
        if limit <= 0:
            return []
        taken = queue.take_in(claim.conn, claim.sub, limit=limit, keyed=False, floor=floor)
        return self.admit(claim, [decode(delivery) for delivery in taken])

    def _take_keyed(
        self, claim: Claiming, queue: Transactional, decode: Decode, limit: int
    ) -> list[Verdict]:
        """Where no order is asked for, a message with an ordering key is one like any other."""
        taken = queue.take_in(claim.conn, claim.sub, limit=limit, keyed=True, floor=0)
        return self.admit(claim, [decode(delivery) for delivery in taken])

    def _fill_lanes(
        self, claim: Claiming, queue: Transactional, decode: Decode, limit: int
    ) -> bool:
        """Move keyed messages into their lanes until enough conversations can go on.

        True: it stopped before that, not to hold the write lock for a whole backlog.
        """
        for _ in range(LANE_CHUNKS):
            if not queue.has_keyed_in(claim.conn, claim.sub):
                return False
            if ready_heads(claim, limit) >= limit:
                return False
            taken = queue.take_in(claim.conn, claim.sub, limit=LANE_CHUNK, keyed=True, floor=0)
            self.adopt_in_order(claim, [decode(delivery) for delivery in taken])
        return True

    def adopt_in_order(self, claim: Claiming, candidates: Sequence[Candidate]) -> list[Verdict]:
        """Take keyed messages over, in broker order. All of them may be acknowledged then."""
        known = append_to_lanes(claim, candidates)
        others = {id(candidate) for candidate in known}
        new = [c.message for c in candidates if c.message is not None and id(c) not in others]
        self._append(claim, created(claim.sub, [(m, to_us(m.created_at)) for m in new]))
        for candidate in known:
            if candidate.message is None:
                self._append(claim, ends.undecodable(claim, candidate))
            else:
                self._known(claim, candidate, candidate.message, runs=False)
        return [Verdict(answer=Answer.WAITING, delivery=c.delivery) for c in candidates]

    # -- broker copies ----------------------------------------------------------------------------

    def admit(self, claim: Claiming, candidates: Sequence[Candidate]) -> list[Verdict]:
        """Claim what is new; say of the rest what it is."""
        if not candidates:
            return []
        verdicts: dict[int, Verdict] = {}
        new: list[_New] = []
        again: list[tuple[int, Candidate, Message]] = []
        broken: list[tuple[int, Candidate]] = []
        seen: set[tuple[str, str]] = set()
        rowid = tasks.max_rowid(claim.conn)
        for at, candidate in enumerate(candidates):
            message = candidate.message
            if message is None:
                broken.append((at, candidate))
                continue
            identity = (message.tenant_id, message.id)
            if identity in seen:
                again.append((at, candidate, message))
                continue
            seen.add(identity)
            rowid += 1
            new.append((at, tasks.task(claim, candidate, message, rowid)))
        new = self._insert(claim, new, verdicts)
        self._grant(claim, new, verdicts)
        for at, candidate, message in again:
            verdicts[at] = self._known(claim, candidate, message)
        for at, candidate in broken:  # after the new rows, whose numbers are already given out
            self._append(claim, ends.undecodable(claim, candidate))
            verdicts[at] = Verdict(answer=Answer.DEAD, delivery=candidate.delivery)
        return [verdicts[at] for at in range(len(candidates))]

    def _insert(self, claim: Claiming, new: list[_New], verdicts: dict[int, Verdict]) -> list[_New]:
        """Write the rows; where one was there before, answer for its candidate instead."""
        if not new:
            return new
        inserted = rows.insert_columns(
            claim.conn,
            tasks.INSERT,
            tasks.columns(claim, [task for _, task in new], uuid7_block(len(new))),
            shared=tasks.claimed(claim),
            alike=tasks.ALIKE,
        )
        if inserted == len(new):
            return new
        fresh: list[_New] = []
        for at, task in new:
            existing = tasks.find(claim.conn, claim.sub, task.message)
            if existing is not None and existing.rowid == task.rowid:
                fresh.append((at, task))
            else:
                verdicts[at] = self._known(claim, task.candidate, task.message)
        return fresh

    def _grant(self, claim: Claiming, new: Sequence[_New], verdicts: dict[int, Verdict]) -> None:
        """Runs for new rows, less those that are over time or whose key belongs to another."""
        keys = [
            (task.message.tenant_id, task.key, task.message.id)
            for _, task in new
            if task.key is not None
        ]
        lost = take_keys(claim, keys)
        entries = created(claim.sub, [(task.message, task.created_us) for _, task in new])
        book, mine = claim.book, claim.mine
        token, foreign, granted = Token(claim.worker_id, 1), claim.sub.codec == TASK, Answer.RUN
        for at, task in new:
            delivery, message = task.candidate.delivery, task.message
            run = tasks.new_run(claim, task, token)
            if foreign and message.metadata.get("retry_count"):
                run = self._failed_elsewhere(claim, run)
            expires = task.expires_us
            if expires is not None and expires <= claim.expiry_us:
                entries += ends.expired(claim, run)
                verdicts[at] = Verdict(answer=Answer.EXPIRED, delivery=delivery)
            elif lost and (message.tenant_id, message.id) in lost:
                holder = lost[(message.tenant_id, message.id)]
                answer = self._lost_key(claim, run, holder, task.candidate, entries)
                verdicts[at] = Verdict(answer=answer, delivery=delivery)
            elif mine is not None and message.type not in mine:
                verdicts[at] = pass_on(claim, run, task.candidate, entries)
            elif isinstance(admitted := run if book is None else book.admit(run), PutOff):
                entries.append(put_off(claim, run, admitted, task.candidate, expires))
                verdicts[at] = Verdict(answer=Answer.WAITING, delivery=delivery)
            else:
                if delivery.taken_from is not None:
                    entries.append(reclaim(claim, run, delivery, None))
                entries.append(claimed(admitted))
                verdicts[at] = Verdict(answer=granted, run=admitted, delivery=delivery)
        if book is not None:
            book.save()
        self._append(claim, entries)

    def _failed_elsewhere(self, claim: Claiming, run: Run) -> Run:
        """A task that somebody else's worker tried before: its failures count here, too."""
        counted = failed_elsewhere(claim.sub, run)
        if counted is run:
            return run
        claim.conn.execute(
            "UPDATE queue_executions SET attempt = ?, retry_count = ? WHERE rowid = ?",
            (counted.attempt, counted.failures, run.row),
        )
        return counted

    def _known(
        self, claim: Claiming, candidate: Candidate, message: Message, *, runs: bool = True
    ) -> Verdict:
        """A copy of a task that exists already. `runs`: whoever asks would run it."""
        delivery = candidate.delivery
        row = tasks.find(claim.conn, claim.sub, message)
        if row is None:
            raise StoreCorrupt(f"task {message.id} vanished inside its own transaction")
        if differs := what_differs(claim.sub, candidate, message, row):
            self._append(claim, ends.id_conflict(claim, candidate, message, differs))
            return Verdict(answer=Answer.DEAD, delivery=delivery)
        if row.status in FINAL:
            if row.status == Status.FAILED:
                ends.complete_letter(claim, candidate, message)
            elif row.status == Status.SUCCEEDED and self._ledger.notices is not None:
                identity = (message.tenant_id, claim.sub.name, message.id)
                self._ledger.notices.again(claim.conn, identity, claim.now_us)
            return Verdict(answer=Answer.FINAL, delivery=delivery)
        if row.status == Status.OPEN:
            _, most = crashes_of(Company.ANY, isolates=self._isolates)
            if runs and row.crashes <= most:
                return self._reopen(claim, candidate, message, row)
            return self._keep(claim, candidate, row)
        if row.held == "broker":
            tasks.hold(claim.conn, row.rowid, candidate)
            return Verdict(answer=Answer.ADOPTED, delivery=delivery)
        return Verdict(answer=Answer.KNOWN, delivery=delivery)

    def _reopen(
        self, claim: Claiming, candidate: Candidate, message: Message, row: tasks.Existing
    ) -> Verdict:
        """The broker brings back what a dead worker ran or a drain released: claim it, or end it if
        its time is over meanwhile."""
        delivery = candidate.delivery
        claim.conn.execute(REOPEN, (claim.worker_id, row.rowid))
        if claim.held == "store":
            tasks.hold(claim.conn, row.rowid, candidate)
        run = msgspec.structs.replace(
            tasks.new_run(
                claim,
                tasks.task(claim, candidate, message, row.rowid),
                Token(claim.worker_id, row.epoch + 1),
            ),
            message=msgspec.structs.replace(message, attempt=row.attempt + 1),
            attempt=row.attempt + 1,
            crashes=row.crashes,
            history=decode_history(row.history),
        )
        run = self._failed_elsewhere(claim, run)
        expires = expires_us(delivery, message, claim.ahead)
        if expires is not None and expires <= claim.expiry_us:
            self._append(claim, ends.expired(claim, run))
            return Verdict(answer=Answer.EXPIRED, delivery=delivery)
        entries: list[Entry] = []
        if claim.mine is not None and message.type not in claim.mine:
            verdict = pass_on(claim, run, candidate, entries)
            self._append(claim, entries)
            return verdict
        if claim.book is not None:
            admitted = claim.book.admit(run)
            claim.book.save()
            if isinstance(admitted, PutOff):
                self._append(claim, [put_off(claim, run, admitted, candidate, expires)])
                return Verdict(answer=Answer.WAITING, delivery=delivery)
            run = admitted
        if delivery.taken_from is not None or row.lost_by is not None:
            entries.append(reclaim(claim, run, delivery, row.lost_by))
        self._append(claim, [*entries, claimed(run)])
        return Verdict(answer=Answer.RUN, run=run, delivery=delivery)

    def _keep(self, claim: Claiming, candidate: Candidate, row: tasks.Existing) -> Verdict:
        """The same, of what is suspect or comes to have its place in a lane: it runs from here."""
        tasks.hold(claim.conn, row.rowid, candidate)
        claim.conn.execute(
            "UPDATE queue_executions SET status = 'ready', due_at = ? WHERE rowid = ?",
            (claim.now_us, row.rowid),
        )
        return Verdict(answer=Answer.WAITING, delivery=candidate.delivery)

    # -- what the store holds ---------------------------------------------------------------------

    def claim_ready(
        self, claim: Claiming, priority: int, limit: int, company: Company = Company.ANY
    ) -> list[Verdict]:
        """Due tasks of one priority: retries, resumed, adopted, lane heads."""
        low, high = crashes_of(company, isolates=self._isolates)
        choice, asked = claim.choice, (claim.worker_id, claim.sub.name, priority, claim.now_us)
        found = claim.conn.execute(
            CLAIM_READY[choice.rule], (*asked, low, high, limit, *tasks.chosen_value(choice))
        ).fetchall()
        if not found:
            return []
        lost = take_keys(claim, [(row[1], row[7], row[2]) for row in found if row[7] is not None])
        yes = approved_of(claim, [(row[1], row[2]) for row in found]) if claim.governed else {}
        entries: list[Entry] = []
        verdicts = [self._ready(claim, row, lost, yes, entries) for row in found]
        if claim.book is not None:
            claim.book.save()
        self._append(claim, entries)
        return verdicts

    def _ready(
        self,
        claim: Claiming,
        row: Sequence[Any],
        lost: dict[tuple[str, str], Holder],
        approved: dict[tuple[str, str], tuple[Approved, ...]],
        entries: list[Entry],
    ) -> Verdict:
        try:
            run = tasks.run_of_row(claim, row)
        except (StoreCorrupt, DecodeError) as error:
            entries += ends.unreadable(claim, row, error)
            return Verdict(answer=Answer.DEAD)
        expires = row[8]
        if expires is not None and expires <= claim.expiry_us:
            entries += ends.expired(claim, run)
            return Verdict(answer=Answer.EXPIRED)
        holder = lost.get((run.message.tenant_id, run.message.id))
        if holder is not None:
            return Verdict(answer=self._lost_key(claim, run, holder, None, entries))
        if claim.mine is not None and run.message.type not in claim.mine:
            return pass_on(claim, run, None, entries)
        if approved:
            answers = approved.get((run.message.tenant_id, run.message.id), ())
            run = msgspec.structs.replace(run, approvals=answers)
        if claim.book is not None:
            admitted = claim.book.admit(run)
            if isinstance(admitted, PutOff):
                entries.append(put_off(claim, run, admitted, None, expires))
                return Verdict(answer=Answer.WAITING)
            run = admitted
        lost_by = row[13]
        if lost_by is not None:
            entries.append(reclaim(claim, run, None, lost_by))
        entries.append(claimed(run))
        return Verdict(answer=Answer.RUN, run=run)

    def _lost_key(
        self,
        claim: Claiming,
        run: Run,
        holder: Holder,
        candidate: Candidate | None,
        entries: list[Entry],
    ) -> Answer:
        """Its key belongs to another message: a duplicate if that one is done, else it waits."""
        message = run.message
        identity = (message.tenant_id, run.subscription, message.id)
        if holder.state == "done":
            data = final_data(
                run.queue,
                message.tenant_id,
                message.id,
                message.type,
                message.trace_id,
                Status.DUPLICATE,
            )
            entries.append(
                end_as_duplicate(claim.conn, run.row, holder, claim.now_us, identity, data)
            )
            return Answer.DUPLICATE
        if candidate is not None:
            tasks.hold(claim.conn, run.row, candidate)
        claim.conn.execute(
            "UPDATE queue_executions SET status = 'waiting_key', worker_id = NULL,"
            " attempt = attempt - 1 WHERE rowid = ?",
            (run.row,),
        )
        key = (message.tenant_id, run.subscription, run.idem_key or "")
        if is_free(claim.conn, *key):  # its holder ended in this very batch
            entries += resolve_key(claim.conn, *key, claim.now_us)
        return Answer.WAITING

    def _append(self, claim: Claiming, entries: Sequence[Entry]) -> None:
        self._ledger.append(claim.conn, claim.worker_id, entries, claim.now_us)


def next_due(claim: Claiming) -> int | None:
    """When the next task that waits in the store is due (µs)."""
    found = claim.conn.execute(NEXT_DUE, (claim.sub.name, claim.now_us))
    return min((due for (due,) in found if due is not None), default=None)
