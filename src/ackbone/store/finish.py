"""Finish: outcome, dedup record, ledger, follow-ups and replies of a batch, in one transaction.

A row is written only if it still bears the run's token. Otherwise the run is refused (FENCED), or
was written before (ALREADY, or BURIED if it became a dead letter then). A batch of plain successes
is one statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ackbone.core import events
from ackbone.core.events import Entry
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

from .delivery_rows import created_event, delivery_row
from .outcomes import (
    bury,
    failures_after,
    final_entry,
    history_after,
    identity_of,
    letter_of,
    repeated,
    runs_again,
)
from .parked import ask
from .quota_book import QuotaBook
from .unit import WORK, Change, Key, Tx


async def finish(tx: Tx, change: Change, batch: Sequence[Finished]) -> list[Commit]:
    """One commit answer per run, in the order of the batch."""
    holders = await tx.tasks.finish(batch)
    commits = [Commit.COMMITTED] * len(batch)
    committed = batch
    if None in holders:
        commits = await _answers(tx, batch, holders)
        committed = [item for item, held in zip(batch, holders, strict=True) if held is not None]
        holders = [held for held in holders if held is not None]
    # If the store holds the message, no copy at the broker would come back to publish its result
    # in case this worker dies first.
    change.told |= {
        identity_of(item.run)
        for item, held in zip(committed, holders, strict=True)
        if item.told_on_ack and held == "broker"
    }
    now_us = await tx.moment()
    entries, succeeded = change.entries, Status.SUCCEEDED
    for item in committed:
        if type(item.outcome) is Done:
            entries.append(final_entry(item, succeeded, {}))
        else:
            entries += _events_of(tx, item, now_us)
    _keys(tx, change, committed)
    counted = [item for item in committed if item.run.quotas]
    if counted:
        book = QuotaBook(tx)
        await book.open_for([item.run for item in counted])
        book.correct(counted)
        book.save()
    _lanes(change, committed)
    _follow_ups(change, committed, now_us)
    return commits


async def _answers(
    tx: Tx, batch: Sequence[Finished], holders: Sequence[str | None]
) -> list[Commit]:
    """A run that was not written now was written before, or its claim was taken away."""
    refused = [item.run for item, held in zip(batch, holders, strict=True) if held is None]
    found = await tx.tasks.tokens(refused)
    commits = []
    for item, held in zip(batch, holders, strict=True):
        if held is not None:
            commits.append(Commit.COMMITTED)
            continue
        token, row = item.run.token, found.get(identity_of(item.run))
        mine = row is not None and row[:2] == (token.worker_id, token.epoch)
        if row is not None and mine and row[2] != Status.RUNNING:
            commits.append(repeated(item, row[2]))
        else:
            commits.append(Commit.FENCED)
    return commits


def _events_of(tx: Tx, item: Finished, now_us: int) -> list[Entry]:  # noqa: PLR0911 - one each
    """The events of a run, and its dead letter or its question to a person if it has one."""
    run, outcome = item.run, item.outcome
    head = identity_of(run)
    match outcome:
        case Done():
            return [final_entry(item, Status.SUCCEEDED, {})]
        case Retry(after_s, reason):
            if not runs_again(item):  # the crash budget is spent
                return _buried(tx, item, Status.FAILED, "crash_budget", reason, now_us)
            data = {
                "attempt": run.attempt,
                "retry_count": failures_after(item),
                "after_s": round(after_s, 3),
                "error": storable(reason),
            }
            return [(*head, events.RETRIED, data)]
        case Dead(reason, error):
            return _buried(tx, item, Status.FAILED, reason, error, now_us)
        case Expired():
            return _buried(tx, item, Status.EXPIRED, "expired", "its time was over", now_us)
        case Rejected(reason, policies):
            extra: dict[str, Any] = {"reason": storable(reason), "policies": list(policies)}
            found = [final_entry(item, Status.REJECTED, extra)]
            if item.keep_rejected:
                found.append(bury(tx, letter_of(run, "rejected", reason), now_us))
            return found
        case Park(kind, reason, question):
            aside: Entry = (*head, events.PARKED, {"kind": kind, "reason": storable(reason)})
            if question is None:
                return [aside]
            return [aside, ask(tx, item, question, now_us)]
        case Discarded(reason):
            return [final_entry(item, Status.DISCARDED, {"reason": storable(reason)})]
        case Released():
            return [(*head, events.RELEASED, {"attempt": run.attempt})]
        case Duplicate(of):
            return [final_entry(item, Status.DUPLICATE, {"first_id": of})]


def _buried(
    tx: Tx, item: Finished, status: Status, reason: str, error: str, now_us: int
) -> list[Entry]:
    """The final event and the dead letter of a run that failed or came too late."""
    letter = letter_of(item.run, reason, error)
    if isinstance(item.outcome, Dead | Retry):
        letter.history = history_after(item, error, now_us)
        letter.retry_count = failures_after(item)
    extra = {"reason": reason, "error": storable(error), "retry_count": letter.retry_count}
    return [final_entry(item, status, extra), bury(tx, letter, now_us)]


def _keys(tx: Tx, change: Change, committed: Sequence[Finished]) -> None:
    """Successes keep their results with their keys, other ends free them. A message that is
    parked or runs again keeps its key."""
    done: list[Finished] = []
    freed: list[tuple[Key, str]] = []
    for item in committed:
        run = item.run
        if run.idem_key is None:
            continue
        succeeded = type(item.outcome) is Done
        if not succeeded and (isinstance(item.outcome, Park) or runs_again(item)):
            continue
        key = (run.message.tenant_id, run.subscription, run.idem_key)
        change.keys.add(key)
        if succeeded:
            done.append(item)
        else:
            freed.append((key, run.message.id))
    if done:
        tx.keys.keep(done)
    if freed:
        tx.keys.free(freed)


def _lanes(change: Change, committed: Sequence[Finished]) -> None:
    """A message that ended, or was parked, lets its conversation go on; one that runs again holds
    it."""
    for item in committed:
        if type(item.outcome) is not Done and runs_again(item):
            change.topics.add(WORK)
        elif item.run.lane is not None:
            run = item.run
            change.lanes.add((run.message.tenant_id, run.subscription, item.run.lane))


def _follow_ups(change: Change, committed: Sequence[Finished], now_us: int) -> None:
    """Replies and messages of successful runs are committed with them."""
    for item in committed:
        if type(item.outcome) is not Done:
            continue
        if item.replies:
            replies = [
                delivery_row(item.run, each, n, now_us) for n, each in enumerate(item.replies)
            ]
            change.deliveries += replies
            change.entries.extend(map(created_event, replies))
        if item.sends:
            change.sends += item.sends
