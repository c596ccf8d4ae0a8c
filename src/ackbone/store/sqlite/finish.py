"""Finish: outcome, dedup record, ledger, follow-ups and replies of a batch, in one transaction.

Every row is written only if it still bears the run's token; the rest is refused (FENCED) or was
written before (ALREADY, or BURIED if it became a dead letter then). The common case, a batch of
plain successes, is one statement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.broker import Transactional
from ackbone.core.outcome import (
    Dead,
    Discarded,
    Done,
    Duplicate,
    Expired,
    Park,
    Rejected,
    Released,
    Retry,
    Status,
)
from ackbone.core.store import Commit, Finished
from ackbone.core.text import storable
from ackbone.sqlite import rows
from ackbone.sqlite.wake import OUTGOING
from ackbone.store.approvals import ask
from ackbone.store.letters import bury, letter_of
from ackbone.store.outcomes import failures_after, final_entry, history_after, repeated, runs_again
from ackbone.store.outgoing import created_event, delivery_row, outbox_row

from .keys import free_key, keep_results, resolve_key, someone_waits
from .lanes import advance_lane
from .ledger import Entry, Ledger
from .outbox_rows import DELIVERY, OUTBOX
from .outcome_rows import ALL_DONE_ALIKE, all_done_statement, all_done_values, write_of
from .quotas import SqliteQuotaBook
from .tx import SqliteTx

_SET = (
    "UPDATE queue_executions SET {} WHERE tenant_id = ? AND subscription = ? AND message_id = ?"
    " AND worker_id = ? AND epoch = ? AND status = 'running'"
)


class Finisher:
    """The finish half of the protocol. Runs inside a transaction of the writer thread."""

    def __init__(
        self, ledger: Ledger, queue: Transactional | None, wake: Callable[..., None]
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._wake = wake
        """Called when something became ready: after the commit, fetchers look again."""

    def finish(
        self, conn: sqlite3.Connection, batch: Sequence[Finished], *, worker_id: int, now_us: int
    ) -> list[Commit]:
        done, succeeded = Commit.COMMITTED, Status.SUCCEEDED
        plain = [n for n, item in enumerate(batch) if type(item.outcome) is Done]
        if plain and not self._all_done(conn, [batch[n] for n in plain], now_us):
            plain = []
        commits: list[Commit] = []
        entries: list[Entry] = []
        committed = batch
        if len(plain) == len(batch):
            commits = [done] * len(batch)
            entries = [final_entry(item, succeeded, {}) for item in batch]
        else:
            taken = set(plain)
            for n, item in enumerate(batch):
                if n in taken:
                    commits.append(done)
                    entries.append(final_entry(item, succeeded, {}))
                else:
                    commits.append(self._one(conn, item, entries, now_us))
            pairs = zip(batch, commits, strict=True)
            committed = [item for item, commit in pairs if commit is done]
        self._keys(conn, committed, entries, now_us)
        counted = [item for item in committed if item.run.quotas]
        if counted:
            SqliteQuotaBook(conn, now_us).correct(counted)
        self._lanes(conn, committed, now_us)
        self._follow_ups(conn, committed, entries, now_us)
        told = {_identity(item) for item in committed if item.told_on_ack}
        if not plain:
            told -= _adopted(conn, told)
        self._ledger.append(conn, worker_id, entries, now_us, told=told)
        return commits

    def _all_done(self, conn: sqlite3.Connection, batch: Sequence[Finished], now_us: int) -> bool:
        """All or nothing: True if every row still bore its token, and was held by whom the run
        knows of; else nothing was written."""
        values = [all_done_values(item) for item in batch]
        conn.execute("SAVEPOINT done")
        changed = rows.update(
            conn, all_done_statement, values, shared=(now_us,), alike=ALL_DONE_ALIKE
        )
        if changed != len(batch):
            conn.execute("ROLLBACK TO done")
        conn.execute("RELEASE done")
        return changed == len(batch)

    def _one(
        self, conn: sqlite3.Connection, item: Finished, entries: list[Entry], now_us: int
    ) -> Commit:
        """One run of any outcome, by its identity and token."""
        assignments, values, status = write_of(item, now_us)
        run = item.run
        identity = (run.message.tenant_id, run.subscription, run.message.id)
        token = (run.token.worker_id, run.token.epoch)
        changed = conn.execute(_SET.format(assignments), (*values, *identity, *token)).rowcount
        if changed != 1:
            return _why_not(conn, item, identity, token)
        if status is Status.READY:
            self._wake()
        entries.extend(self._events_of(conn, item, status, now_us))
        return Commit.COMMITTED

    def _events_of(  # noqa: PLR0911 - one per outcome
        self, conn: sqlite3.Connection, item: Finished, status: Status, now_us: int
    ) -> list[Entry]:
        run, outcome = item.run, item.outcome
        message = run.message
        head = (message.tenant_id, run.subscription, message.id)
        match outcome:
            case Done():
                return [final_entry(item, status, {})]
            case Retry(after_s, reason):
                if status is Status.FAILED:  # the crash budget is spent
                    return self._buried(conn, item, status, "crash_budget", reason, now_us)
                data = {
                    "attempt": run.attempt,
                    "retry_count": failures_after(item),
                    "after_s": round(after_s, 3),
                    "error": storable(reason),
                }
                return [(*head, events.RETRIED, data)]
            case Dead(reason, error):
                return self._buried(conn, item, status, reason, error, now_us)
            case Expired():
                return self._buried(conn, item, status, "expired", "its time was over", now_us)
            case Rejected(reason, policies):
                extra: dict[str, Any] = {"reason": storable(reason), "policies": list(policies)}
                found = [final_entry(item, status, extra)]
                if item.keep_rejected:
                    found.append(
                        bury(SqliteTx(conn, now_us), letter_of(run, "rejected", reason), now_us)
                    )
                return found
            case Park(kind, reason, question):
                aside: Entry = (*head, events.PARKED, {"kind": kind, "reason": storable(reason)})
                if question is None:
                    return [aside]
                return [aside, ask(SqliteTx(conn, now_us), item, question, now_us)]
            case Discarded(reason):
                return [final_entry(item, status, {"reason": storable(reason)})]
            case Released():
                return [(*head, events.RELEASED, {"attempt": run.attempt})]
            case Duplicate(of):
                return [final_entry(item, status, {"first_id": of})]

    def _buried(
        self,
        conn: sqlite3.Connection,
        item: Finished,
        status: Status,
        reason: str,
        error: str,
        now_us: int,
    ) -> list[Entry]:
        run = item.run
        letter = letter_of(run, reason, error)
        if isinstance(item.outcome, Dead | Retry):
            letter.history = history_after(item, error, now_us)
            letter.retry_count = failures_after(item)
        extra = {"reason": reason, "error": storable(error), "retry_count": letter.retry_count}
        return [final_entry(item, status, extra), bury(SqliteTx(conn, now_us), letter, now_us)]

    def _keys(
        self,
        conn: sqlite3.Connection,
        committed: Sequence[Finished],
        entries: list[Entry],
        now_us: int,
    ) -> None:
        """Done keys keep the result; others are freed; who waited for one is told."""
        over: list[tuple[str, str, str]] = []
        done: list[tuple[Any, ...]] = []
        for item in committed:
            run = item.run
            if run.idem_key is None:
                continue
            succeeded = type(item.outcome) is Done
            if not succeeded and (isinstance(item.outcome, Park) or runs_again(item)):
                continue
            key = (run.message.tenant_id, run.subscription, run.idem_key)
            over.append(key)
            if succeeded:
                expires = now_us + int(item.dedup_window_s * 1e6)
                done.append((item.result, expires, *key, run.message.id))
            else:
                free_key(conn, *key, run.message.id)
        keep_results(conn, done)
        if over and someone_waits(conn):
            for key in over:
                entries.extend(resolve_key(conn, *key, now_us))
            self._wake()  # the next one of the key or of a duplicate's lane may be ready now

    def _lanes(self, conn: sqlite3.Connection, committed: Sequence[Finished], now_us: int) -> None:
        for item in committed:
            lane = item.run.lane
            if lane is not None and not runs_again(item):
                identity = (item.run.message.tenant_id, item.run.subscription, lane)
                if advance_lane(conn, *identity, now_us):
                    self._wake()

    def _follow_ups(
        self,
        conn: sqlite3.Connection,
        committed: Sequence[Finished],
        entries: list[Entry],
        now_us: int,
    ) -> None:
        replies: list[tuple[Any, ...]] = []
        sends: dict[str, list[Any]] = {}
        waiting: list[tuple[Any, ...]] = []
        for item in committed:
            if type(item.outcome) is not Done:
                continue
            run = item.run
            for n, reply in enumerate(item.replies):
                replies.append(delivery_row(run, reply, n, now_us))
            for send in item.sends:
                if self._queue is not None:
                    sends.setdefault(send.queue, []).append(send.outgoing)
                else:
                    waiting.append(outbox_row(send, now_us))
        if replies:
            rows.insert(conn, DELIVERY, replies)
            entries.extend(map(created_event, replies))
        if waiting:
            rows.insert(conn, OUTBOX, waiting)
        if replies or waiting:
            self._wake(OUTGOING)
        for queue, batch in sends.items():
            assert self._queue is not None  # noqa: S101 - only then were they collected
            self._queue.publish_in(conn, queue, batch)


def _identity(item: Finished) -> tuple[str, str, str]:
    return item.run.message.tenant_id, item.run.subscription, item.run.message.id


def _adopted(
    conn: sqlite3.Connection, identities: set[tuple[str, str, str]]
) -> set[tuple[str, str, str]]:
    """Those whose copy at the broker is gone: nobody would come back to tell of them."""
    return {
        identity
        for identity in identities
        if conn.execute(
            "SELECT held FROM queue_executions WHERE tenant_id = ? AND subscription = ?"
            " AND message_id = ?",
            identity,
        ).fetchone()
        != ("broker",)
    }


def _why_not(
    conn: sqlite3.Connection,
    item: Finished,
    identity: tuple[str, str, str],
    token: tuple[int, int],
) -> Commit:
    found = conn.execute(
        "SELECT worker_id, epoch, status FROM queue_executions WHERE tenant_id = ?"
        " AND subscription = ? AND message_id = ?",
        identity,
    ).fetchone()
    mine = found is not None and (found[0], found[1]) == token and found[2] != Status.RUNNING
    return repeated(item, found[2]) if mine else Commit.FENCED
