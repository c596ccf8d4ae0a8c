"""Finish: outcome, dedup record, ledger, follow-ups and replies of a batch, in one transaction.

Every row is written only if it still bears the run's token; the rest is refused (FENCED) or was
written before (ALREADY, or BURIED if it became a dead letter then). The common case, a batch of
plain successes, is one statement and the one round trip that commits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ackbone.core import events
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
from ackbone.store.approvals import ask
from ackbone.store.letters import bury, letter_of
from ackbone.store.outcomes import (
    duration_ms,
    failures_after,
    final_entry,
    history_after,
    repeated,
    run_uuid,
    runs_again,
)
from ackbone.store.outgoing import DELIVERY_COLUMNS, created_event, delivery_row, outbox_row
from ackbone.store.stored import crc, run_info
from ackbone.store.unit import Change

from . import arrays, quotas
from .arrays import moment
from .database import Tx
from .keys import KEEP, free_keys
from .ledger import Entry
from .tasks import BEGUN, Identity
from .wake import OUTGOING, WORK

_encode = msgspec.json.Encoder().encode
_IDENTITY = "t.tenant_id = u.tenant AND t.subscription = u.sub AND t.message_id = u.message"
_IF_OWNED = (
    # Not `t.status = 'running'`: all running rows would be read for each one, by their index.
    " AND t.worker_id = u.worker AND CASE t.status WHEN 'running' THEN t.epoch END = u.epoch"
    " RETURNING t.tenant_id, t.subscription, t.message_id, t.worker_id, t.epoch, t.held"
)
_RUNS = "$1::text[], $2::text[], $3::text[], $4::bigint[], $5::int[]"
_RUN_NAMES = "tenant, sub, message, worker, epoch"
_DONE = (
    "UPDATE queue_executions t SET status = 'succeeded', result = u.result,"
    " completed_at = clock_timestamp(), duration_ms = u.duration, agent_run_id = u.run_id,"
    " retry_count = u.failures, body = NULL, body_info = NULL, due_at = NULL"
    f" FROM unnest({_RUNS}, $6::bytea[], $7::int[], $8::uuid[], $9::int[]{{}})"
    f" u({_RUN_NAMES}, result, duration, run_id, failures{{}}) WHERE {{}}{_IF_OWNED}"
)
ALL_DONE = _DONE.format("", "", _IDENTITY)
DONE_IN_PLACE = _DONE.format(
    ", $10::tid[]",
    ", place",
    # In words that no index is used for: a plan made while the table is empty takes any of them.
    "t.ctid = u.place AND (t.tenant_id, t.subscription, t.message_id)"
    " IS NOT DISTINCT FROM (u.tenant, u.sub, u.message)",
)
"""Where the claim put them. A row that was written meanwhile is elsewhere now, and not found."""
OTHERS = (
    "UPDATE queue_executions t SET status = CASE WHEN u.status = 'handed back' THEN CASE t.held"
    " WHEN 'store' THEN 'ready' ELSE 'open' END ELSE u.status END,"
    " held = CASE WHEN u.hold THEN 'store' ELSE t.held END,"
    " body = CASE WHEN u.hold THEN coalesce(t.body, u.body) WHEN u.ended THEN NULL ELSE t.body END,"
    " body_info = CASE WHEN u.hold THEN coalesce(t.body_info::text, u.info)::json"
    " ELSE t.body_info END,"
    " body_crc = CASE WHEN u.hold THEN coalesce(t.body_crc, u.crc) ELSE t.body_crc END,"
    " completed_at = CASE WHEN u.ended THEN clock_timestamp() ELSE t.completed_at END,"
    " due_at = CASE WHEN u.wait_us IS NULL THEN t.due_at"
    f" ELSE {BEGUN} + u.wait_us * interval '1 microsecond' END,"
    " duration_ms = coalesce(u.duration, t.duration_ms),"
    " retry_count = coalesce(u.failures, t.retry_count),"
    " error_message = coalesce(u.error, t.error_message),"
    " history = coalesce(u.history, t.history::text)::json,"
    " parked_kind = coalesce(u.parked, t.parked_kind), attempt = t.attempt - u.given_back,"
    " crashes = t.crashes + u.crashed, lane = CASE WHEN u.leave THEN NULL ELSE t.lane END"
    f" FROM unnest({_RUNS}, $6::text[], $7::bool[], $8::bool[], $9::bytea[], $10::text[],"
    " $11::bigint[], $12::bigint[], $13::int[], $14::int[], $15::text[], $16::text[], $17::text[],"
    f" $18::int[], $19::int[], $20::bool[]) u({_RUN_NAMES}, status, hold, ended, body, info, crc,"
    " wait_us, duration, failures, error, history, parked, given_back, crashed, leave)"
    f" WHERE {_IDENTITY}{_IF_OWNED}"
)
_WHY_NOT = (
    "SELECT t.tenant_id, t.subscription, t.message_id, t.worker_id, t.epoch, t.status"
    " FROM unnest($1::text[], $2::text[], $3::text[]) u(tenant, sub, message)"
    " JOIN queue_executions t ON t.tenant_id = u.tenant AND t.subscription = u.sub"
    " AND t.message_id = u.message"
)
DELIVERIES = (
    f"INSERT INTO deliveries ({DELIVERY_COLUMNS}) SELECT u.id, u.tenant, u.sub, u.task, u.channel,"
    " u.recipient, u.content, u.conversation, u.priority,"
    f" {moment('u.due')}, {moment('u.created')}, u.lane, u.options, u.retries,"
    f" {moment('u.expires')} FROM unnest($1::text[], $2::text[], $3::text[], $4::text[],"
    " $5::text[], $6::text[], $7::text[], $8::text[], $9::int[], $10::bigint[], $11::bigint[],"
    " $12::text[], $13::json[], $14::int[], $15::bigint[]) u(id, tenant, sub, task,"
    " channel, recipient, content, conversation, priority, due, created, lane, options, retries,"
    " expires) ON CONFLICT (id) DO NOTHING"
)
OUTBOX = (
    "INSERT INTO outbox (id, tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
    " ordering_key, ttl_us, due_at, created_at) SELECT u.id, u.tenant, u.queue, u.message,"
    " u.headers, u.body, u.crc, u.priority, u.key, u.ttl,"
    f" {moment('u.due')}, {moment('u.created')}"
    " FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::json[], $6::bytea[],"
    " $7::bigint[], $8::int[], $9::text[], $10::bigint[], $11::bigint[], $12::bigint[]) u(id,"
    " tenant, queue, message, headers, body, crc, priority, key, ttl, due, created)"
)
HANDED_BACK = "handed back"
"""To the broker, or to the store, whoever holds it."""


class _Write(NamedTuple):
    """What an outcome other than success writes into the row of its task."""

    status: str
    hold: bool = False
    ended: bool = False
    wait_us: int | None = None
    duration_ms: int | None = None
    failures: int | None = None
    error: str | None = None
    history: str | None = None
    parked_kind: str | None = None
    given_back: int = 0
    crashed: int = 0
    leave_lane: bool = False


Claimed = tuple[str, str, str, int, int]
"""Which claim a run has: the identity of its task, and its token."""


async def finish(tx: Tx, change: Change, batch: Sequence[Finished]) -> list[Commit]:
    """One commit answer per item, in the order of the batch."""
    # A claim that a crash of the server took back may have been granted again while its run went
    # on. Both runs have the same token then: the first one to end is the one that counts.
    first: dict[Claimed, int] = {}
    for n, item in enumerate(batch):
        first.setdefault(_claimed(item), n)
    ends = [batch[n] for _, n in sorted(first.items())]
    done = [item for item in ends if type(item.outcome) is Done]
    others = [item for item in ends if type(item.outcome) is not Done]
    written: dict[Claimed, str] = {}
    if done:
        written |= await _write_done(tx, done)
    if others:
        written |= await _write_others(tx, others, await tx.moment())
    places = sorted(first[claim] for claim in written)
    commits = await _answers(tx, batch, places)
    committed = [batch[n] for n in places]
    now_us = await tx.moment()
    # Without the broker's copy nobody would come back to tell of it, should this worker die first.
    change.told |= {
        _identity(item)
        for item in committed
        if item.told_on_ack and written[_claimed(item)] == "broker"
    }
    for item in committed:
        change.entries.extend(_events_of(tx, item, now_us))
    _keys(tx, change, committed)
    counted = [item for item in committed if item.run.quotas]
    if counted:
        await quotas.correct(tx, counted, now_us)
    _lanes(change, committed)
    _follow_ups(tx, change, committed, now_us)
    return commits


def _identity(item: Finished) -> Identity:
    run = item.run
    return run.message.tenant_id, run.subscription, run.message.id


def _claimed(item: Finished) -> Claimed:
    run = item.run
    message, token = run.message, run.token
    return message.tenant_id, run.subscription, message.id, token.worker_id, token.epoch


def _tokens(batch: Sequence[Finished]) -> tuple[str, ...]:
    found = [_identity(item) for item in batch]
    return (
        *(arrays.texts([each[n] for each in found]) for n in range(3)),
        arrays.numbers(item.run.token.worker_id for item in batch),
        arrays.numbers(item.run.token.epoch for item in batch),
    )


async def _write_done(tx: Tx, batch: Sequence[Finished]) -> dict[Claimed, str]:
    written: dict[Claimed, str] = {}
    placed = [item for item in batch if item.run.row]
    if placed:
        places = arrays.places(item.run.row for item in placed)
        written |= _who_holds(await tx.rows(DONE_IN_PLACE, *_done_values(placed), places))
    moved = [item for item in batch if _claimed(item) not in written]
    if moved:
        written |= _who_holds(await tx.rows(ALL_DONE, *_done_values(moved)))
    return written


def _who_holds(rows: Sequence[tuple[Any, ...]]) -> dict[Claimed, str]:
    """Of the rows that were written: the broker, or the store."""
    return {row[:5]: row[5] for row in rows}


def _done_values(batch: Sequence[Finished]) -> tuple[str, ...]:
    return (
        *_tokens(batch),
        arrays.blobs(item.result for item in batch),
        arrays.numbers(duration_ms(item) for item in batch),
        arrays.ids(run_uuid(item.agent_run_id) for item in batch),
        arrays.numbers(item.run.failures for item in batch),
    )


async def _write_others(tx: Tx, batch: Sequence[Finished], now_us: int) -> dict[Claimed, str]:
    writes = [_write_of(item, now_us) for item in batch]
    held = [item.run if write.hold else None for item, write in zip(batch, writes, strict=True)]
    rows = await tx.rows(
        OTHERS,
        *_tokens(batch),
        arrays.texts([write.status for write in writes]),
        arrays.numbers(write.hold for write in writes),
        arrays.numbers(write.ended for write in writes),
        arrays.blobs(None if run is None else run.body for run in held),
        arrays.texts([None if run is None else run_info(run) for run in held]),
        arrays.numbers(None if run is None else crc(run.body) for run in held),
        arrays.numbers(write.wait_us for write in writes),
        arrays.numbers(write.duration_ms for write in writes),
        arrays.numbers(write.failures for write in writes),
        arrays.texts([write.error for write in writes]),
        arrays.texts([write.history for write in writes]),
        arrays.texts([write.parked_kind for write in writes]),
        arrays.numbers(write.given_back for write in writes),
        arrays.numbers(write.crashed for write in writes),
        arrays.numbers(write.leave_lane for write in writes),
    )
    return _who_holds(rows)


async def _answers(tx: Tx, batch: Sequence[Finished], committed: Sequence[int]) -> list[Commit]:
    """What was not committed now was committed before, or is another run's by now."""
    commits = [Commit.FENCED] * len(batch)
    for n in committed:
        commits[n] = Commit.COMMITTED
    if len(committed) == len(batch):
        return commits
    refused = [n for n, commit in enumerate(commits) if commit is Commit.FENCED]
    found = [_identity(batch[n]) for n in refused]
    rows = await tx.rows(_WHY_NOT, *(arrays.texts([each[n] for each in found]) for n in range(3)))
    over = {row[:5]: row[5] for row in rows if row[5] != Status.RUNNING}
    for n in refused:
        status = over.get(_claimed(batch[n]))
        if status is not None:
            commits[n] = repeated(batch[n], status)
    return commits


def _write_of(item: Finished, now_us: int) -> _Write:  # noqa: PLR0911 - one per outcome
    match item.outcome:
        case Retry(after_s, reason, crashed):
            history = _encode(history_after(item, reason, now_us)).decode()
            error = storable(reason)
            if not runs_again(item):
                return _Write("failed", ended=True, error=error, history=history, crashed=1)
            return _Write(
                "ready",
                hold=True,
                wait_us=int(after_s * 1e6),
                failures=failures_after(item),
                error=error,
                history=history,
                crashed=int(crashed),
            )
        case Park(kind, reason):  # set aside is not failed: the attempt is given back
            return _Write(
                "parked",
                hold=True,
                error=storable(reason),
                parked_kind=kind,
                given_back=1,
                leave_lane=item.on_parked == "skip",
            )
        case Released(after_s):  # with a wait the store keeps it: a broker would not wait
            waits = after_s > 0
            status = "ready" if waits else HANDED_BACK
            return _Write(status, hold=waits, wait_us=int(after_s * 1e6), given_back=1)
        case Dead(reason, error):
            return _ended(Status.FAILED, error or reason, item)
        case Expired():
            return _ended(Status.EXPIRED, "expired before it could run", item)
        case Rejected(reason):
            return _ended(Status.REJECTED, reason, item)
        case Discarded(reason):
            return _ended(Status.DISCARDED, reason, item)
        case Duplicate(of):
            return _ended(Status.DUPLICATE, f"duplicate of {of}", item)
        case Done():
            raise AssertionError("successes are written by themselves")


def _ended(status: Status, why: str, item: Finished) -> _Write:
    return _Write(
        status.value,
        ended=True,
        duration_ms=duration_ms(item),
        failures=failures_after(item),
        error=storable(why),
    )


def _events_of(tx: Tx, item: Finished, now_us: int) -> list[Entry]:  # noqa: PLR0911 - as above
    run, outcome = item.run, item.outcome
    head = _identity(item)
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
    run = item.run
    letter = letter_of(run, reason, error)
    if isinstance(item.outcome, Dead | Retry):
        letter.history = history_after(item, error, now_us)
        letter.retry_count = failures_after(item)
    extra = {"reason": reason, "error": storable(error), "retry_count": letter.retry_count}
    return [final_entry(item, status, extra), bury(tx, letter, now_us)]


def _keys(tx: Tx, change: Change, committed: Sequence[Finished]) -> None:
    """Done keys keep the result; others are freed; who waits for one is looked for afterwards."""
    done: list[tuple[tuple[str, str, str], Finished]] = []
    freed: list[tuple[tuple[str, str, str], str]] = []
    for item in committed:
        run = item.run
        if run.idem_key is None or isinstance(item.outcome, Park) or runs_again(item):
            continue
        key = (run.message.tenant_id, run.subscription, run.idem_key)
        change.keys.add(key)
        if type(item.outcome) is Done:
            done.append((key, item))
        else:
            freed.append((key, run.message.id))
    if done:
        done.sort(key=lambda each: each[0])
        tx.before_end(
            KEEP,
            *(arrays.texts([key[n] for key, _ in done]) for n in range(3)),
            arrays.texts([item.run.message.id for _, item in done]),
            arrays.blobs(item.result for _, item in done),
            arrays.numbers(int(item.dedup_window_s * 1e6) for _, item in done),
        )
    free_keys(tx, freed)


def _lanes(change: Change, committed: Sequence[Finished]) -> None:
    for item in committed:
        run = item.run
        if run.lane is not None and not runs_again(item):
            change.lanes.add((run.message.tenant_id, run.subscription, run.lane))
        if runs_again(item):
            change.topics.add(WORK)


def _follow_ups(tx: Tx, change: Change, committed: Sequence[Finished], now_us: int) -> None:
    replies: list[tuple[Any, ...]] = []
    sends: list[tuple[Any, ...]] = []
    for item in committed:
        if type(item.outcome) is Done:
            replies += [
                delivery_row(item.run, each, n, now_us) for n, each in enumerate(item.replies)
            ]
            sends += [outbox_row(send, now_us) for send in item.sends]
    if sends:
        tx.at_end(OUTBOX, *outbox_values(sends))
    if replies:
        tx.at_end(DELIVERIES, *delivery_values(replies))
        change.entries.extend(map(created_event, replies))
    if replies or sends:
        change.topics.add(OUTGOING)


def outbox_values(rows: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    """The arrays of OUTBOX."""
    columns = list(zip(*rows, strict=True))
    return (
        arrays.ids(columns[0]),
        *(arrays.texts(columns[n]) for n in range(1, 5)),
        arrays.blobs(columns[5]),
        arrays.numbers(columns[6]),
        arrays.numbers(int(each) for each in columns[7]),
        arrays.texts(columns[8]),
        *(arrays.numbers(columns[n]) for n in range(9, 12)),
    )


def delivery_values(rows: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    """The arrays of DELIVERIES."""
    columns = list(zip(*rows, strict=True))
    return (
        *(arrays.texts(columns[n]) for n in range(8)),
        arrays.numbers(int(each) for each in columns[8]),
        *(arrays.numbers(columns[n]) for n in range(9, 11)),
        *(arrays.texts(columns[n]) for n in range(11, 13)),
        *(arrays.numbers(columns[n]) for n in range(13, 15)),
    )
