"""Claims: which worker may run which message. One transaction per batch, one verdict per message.

Why it holds: a row gets into `running` only through a compare-and-set here, and the pair
(worker_id, epoch) on it is new each time. An idempotency key belongs to one message until that
message has ended. A claim of runs alone need not be synced: if a crash takes it back, its run is
refused at the end, and the message, which the broker still has, runs again. Any other answer lets
the broker's copy go, and its claim is synced.

Batches lock tasks first, then keys, then quotas, each of them sorted, so that two batches wait for
each other in one order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ackbone.core.broker import Delivery
from ackbone.core.clock import to_us
from ackbone.core.errors import DecodeError, StoreCorrupt
from ackbone.core.message import Message
from ackbone.core.outcome import FINAL, ParkKind, Status
from ackbone.core.quota import WAITS_FOR
from ackbone.core.store import Answer, Approved, Candidate, Company, Run, Token, Verdict

from . import dead_on_arrival, waiting
from .claiming import (
    Claiming,
    claimed,
    no_handler,
    parked,
    reclaimed,
    waits_for_quota,
)
from .outcomes import identity_of, task_of
from .quota_book import PutOff
from .tables import Copy, Holder, Pair, Wanted
from .task_protocol import created, with_failures_elsewhere
from .tasks import (
    Existing,
    Ready,
    Task,
    body_info,
    crc,
    new_run,
    new_task,
    stored_run,
    what_differs,
)
from .unit import WORK, Identity
from .workers import crashes_of

PRIORITIES = (3, 2, 1, 0)
"""The highest first."""


class _Asking(NamedTuple):
    """A claimed row that is not simply granted."""

    run: Run
    expires_us: int | None
    lost_by: str | None
    candidate: Candidate | None
    """The broker's copy; None: the store holds the message."""

    @property
    def delivery(self) -> Delivery | None:
        return None if self.candidate is None else self.candidate.delivery


class _Batch(NamedTuple):
    """What the verdicts of one batch depend on."""

    lost: Mapping[Pair, Holder]
    """Messages whose key belongs to another one."""
    duplicates: list[tuple[Identity, bytes | None]]
    """Tasks that end as duplicates, written together after all verdicts."""


# -- broker copies --------------------------------------------------------------------------------


async def admit(claim: Claiming, candidates: Sequence[Candidate]) -> list[Verdict]:
    """Claim the messages that are new, and answer for all others by their rows."""
    if not candidates:
        return []
    new: list[Task] = []
    copies: list[Copy] = []
    broken: list[tuple[int, Candidate]] = []
    seen: set[Pair] = set()
    for at, candidate in enumerate(candidates):
        message = candidate.message
        if message is None:
            broken.append((at, candidate))
            continue
        pair = (message.tenant_id, message.id)
        if pair in seen:
            copies.append(Copy(at, candidate, message))
            continue
        seen.add(pair)
        new.append(new_task(claim, at, candidate, message))
    granted = await claim.tx.tasks.claim(claim, new) if new else new
    await claim.tx.require_alive(claim.worker.worker_id)
    if len(granted) < len(new):
        mine = {task.at for task in granted}
        copies += [Copy(t.at, t.candidate, t.message) for t in new if t.at not in mine]
    verdicts: dict[int, Verdict] = {}
    await _grant(claim, granted, verdicts)
    await _answer_copies(claim, copies, verdicts)
    for at, candidate in broken:
        await dead_on_arrival.undecodable(claim, candidate)
        verdicts[at] = Verdict(answer=Answer.DEAD, delivery=candidate.delivery)
    answers = [verdicts[at] for at in range(len(candidates))]
    keep_granted(claim, answers)
    return answers


async def _grant(claim: Claiming, tasks: Sequence[Task], verdicts: dict[int, Verdict]) -> None:
    """Verdicts for rows that this worker has claimed."""
    if not tasks:
        return
    now_us = await claim.tx.moment()
    first = Token(claim.worker.worker_id, 1)
    runs = [new_run(claim, task, first, now_us) for task in tasks]
    entries, protocol = claim.change.entries, claim.sub.protocol
    if protocol is not None:
        runs = await with_failures_elsewhere(claim, protocol, runs)
        entries += created(claim.sub, [(t.message, t.created_us) for t in tasks if t.epoch == 1])
    tasks, runs = await _end_at_once(claim, tasks, runs, verdicts)
    batch = await _prepared(claim, runs)
    mine, simple, yes = claim.mine, not batch.lost and claim.book is None, Answer.RUN
    for task, run in zip(tasks, runs, strict=True):
        delivery = task.candidate.delivery
        if (
            simple
            and (mine is None or run.message.type in mine)
            and task.epoch == 1
            and delivery.taken_from is None
        ):  # nearly always: no call and no wait for one message
            entries.append(claimed(run))
            verdicts[task.at] = Verdict(answer=yes, run=run, delivery=delivery)
        else:
            if task.epoch > 1 and claim.held == "store":
                await _hold(claim, run, task.candidate)
            asking = _Asking(run, task.expires_us, task.lost_by, task.candidate)
            verdicts[task.at] = await _decide(claim, asking, batch)
    await _end_batch(claim, batch)


async def _end_at_once(
    claim: Claiming, tasks: Sequence[Task], runs: list[Run], verdicts: dict[int, Verdict]
) -> tuple[Sequence[Task], list[Run]]:
    """End the tasks whose time to live is over, and those that the broker's server gave up.
    Returns the others, and their runs."""
    over_us = claim.over_us(runs[0].claimed_at_us)
    ended = {
        n
        for n, task in enumerate(tasks)
        if (task.expires_us is not None and task.expires_us <= over_us)
        or task.candidate.delivery.failure is not None
    }
    for n in ended:
        delivery = tasks[n].candidate.delivery
        if delivery.failure is not None:
            await dead_on_arrival.given_up(claim, runs[n], delivery.failure)
            verdict = Verdict(answer=Answer.DEAD, delivery=delivery)
        else:
            await dead_on_arrival.expired(claim, runs[n])
            verdict = Verdict(answer=Answer.EXPIRED, delivery=delivery, failure=Status.EXPIRED)
        verdicts[tasks[n].at] = verdict
    if not ended:
        return tasks, runs
    left = [n for n in range(len(tasks)) if n not in ended]
    return [tasks[n] for n in left], [runs[n] for n in left]


async def _answer_copies(
    claim: Claiming, copies: Sequence[Copy], verdicts: dict[int, Verdict]
) -> None:
    """Verdicts for copies of tasks that have a row already."""
    if not copies:
        return
    pairs = [(copy.message.tenant_id, copy.message.id) for copy in copies]
    found = await claim.tx.tasks.find(claim.sub.name, pairs)
    for copy in sorted(copies, key=lambda each: each.at):
        row = found.get((copy.message.tenant_id, copy.message.id))
        if row is None:
            raise StoreCorrupt(f"task {copy.message.id} vanished inside its own transaction")
        verdicts[copy.at] = await _known(claim, copy.candidate, copy.message, row)


async def _known(claim: Claiming, candidate: Candidate, message: Message, row: Existing) -> Verdict:
    """The verdict for a copy, by the row that was there before it came."""
    tx, sub, delivery = claim.tx, claim.sub, candidate.delivery
    identity = (message.tenant_id, sub.name, message.id)
    answer, failure = Answer.KNOWN, None
    if differs := what_differs(sub, candidate, message, row):
        await dead_on_arrival.id_conflict(claim, candidate, message, differs)
        answer = Answer.DEAD
    elif row.status in FINAL:
        if row.status == Status.FAILED:
            await dead_on_arrival.complete_letter(claim, candidate, message)
        elif row.status == Status.SUCCEEDED:
            claim.change.again.add(identity)
        answer, failure = Answer.FINAL, await _failure(claim, identity, row)
    elif row.status == Status.OPEN:  # a suspect, or it comes for its place in a conversation
        await tx.send(tx.sql.claims.hold, *identity, *_body(candidate))
        await tx.send(tx.sql.claims.keep, *identity, await tx.moment())
        answer = Answer.WAITING
    elif (
        delivery.failure is None
        and tx.granted is not None
        and (run := tx.granted.of(claim, message, row)) is not None
    ):
        return Verdict(answer=Answer.RUN, run=run, delivery=delivery)
    elif row.held == "broker":
        await tx.send(tx.sql.claims.hold, *identity, *_body(candidate))
        answer = Answer.ADOPTED
    return Verdict(answer=answer, delivery=delivery, failure=failure)


async def _failure(claim: Claiming, identity: Identity, row: Existing) -> str | None:
    """Return why a task ended without success, if its copies might be rejected for that."""
    if row.status not in (Status.FAILED, Status.EXPIRED) or claim.sub.ack_policy != "nack":
        return None
    found = await claim.tx.rows(claim.tx.sql.claims.failure, *identity)
    return str(found[0][0]) if found else row.status


# -- conversations --------------------------------------------------------------------------------


async def adopt_in_order(
    claim: Claiming, candidates: Sequence[Candidate], opened: Collection[str] = ()
) -> list[Verdict]:
    """Take over messages with an ordering key, in the broker's order. After the commit, every copy
    may be acknowledged that is not answered by LEAVE."""
    mine = await waiting.of_own_parts(claim, candidates, opened)
    rest = await waiting.append(claim, mine)
    others = {id(candidate) for candidate in rest}
    new = [c.message for c in mine if c.message is not None and id(c) not in others]
    if claim.sub.protocol is not None:
        claim.change.entries += created(claim.sub, [(m, to_us(m.created_at)) for m in new])
    verdicts = {id(c): Verdict(answer=Answer.WAITING, delivery=c.delivery) for c in mine}
    copies = [Copy(at, c, c.message) for at, c in enumerate(rest) if c.message is not None]
    if copies:
        pairs = [(copy.message.tenant_id, copy.message.id) for copy in copies]
        await claim.tx.tasks.lock(claim.sub.name, sorted(pairs))
        known: dict[int, Verdict] = {}
        await _answer_copies(claim, copies, known)
        ended = {id(rest[at]): found for at, found in known.items() if found.failure is not None}
        verdicts.update(ended)
    for candidate in rest:
        if candidate.message is None:
            await dead_on_arrival.undecodable(claim, candidate)
    leave = [Verdict(answer=Answer.LEAVE, delivery=c.delivery) for c in candidates]
    return [verdicts.get(id(c), left) for c, left in zip(candidates, leave, strict=True)]


# -- messages that the store holds ----------------------------------------------------------------


async def claim_ready(claim: Claiming, limit: int, company: Company = Company.ANY) -> list[Verdict]:
    """Claim tasks that the store holds, and return runs that an earlier claim granted whose answer
    was lost."""
    again = await granted_before(claim)
    due = await claim_due(claim, max(0, limit - len(again)), company)
    keep_granted(claim, [*again, *due])
    return [*again, *due]


async def granted_before(claim: Claiming) -> list[Verdict]:
    """Runs of messages that the store holds, which an earlier claim of this process granted: its
    commit was made, and the answer was lost."""
    granted = claim.tx.granted
    kept = [] if granted is None else await granted.held_by_store(claim)
    return [Verdict(answer=Answer.RUN, run=run) for run in kept]


def keep_granted(claim: Claiming, verdicts: Sequence[Verdict]) -> None:
    """Remember all runs of this transaction, in case the answer to its commit is lost."""
    if claim.tx.granted is not None:
        claim.tx.granted.keep(verdicts)


async def claim_due(
    claim: Claiming,
    limit: int,
    company: Company = Company.ANY,
    priorities: Sequence[int] = PRIORITIES,
) -> list[Verdict]:
    """Claim due tasks, the highest priority first: retries, resumed, adopted, lane heads."""
    tx = claim.tx
    rows = await tx.tasks.claim_due(
        claim,
        choice=await claim.choice(),
        crashes=crashes_of(company, isolates=claim.isolates),
        priorities=priorities,
        limit=limit,
    )
    await tx.require_alive(claim.worker.worker_id)
    if not rows:
        return []
    await tx.look_at_clock()
    return await _grant_ready(claim, rows)


async def _grant_ready(claim: Claiming, rows: Sequence[Ready]) -> list[Verdict]:
    """Verdicts for rows that this worker has claimed from the store."""
    now_us = await claim.tx.moment()
    over_us = claim.over_us(now_us)
    runs: dict[int, Run] = {}
    verdicts: dict[int, Verdict] = {}
    for at, row in enumerate(rows):
        try:
            run = stored_run(claim, row, now_us)
        except (StoreCorrupt, DecodeError) as error:
            await dead_on_arrival.unreadable(claim, row, error)
            verdicts[at] = Verdict(answer=Answer.DEAD)
            continue
        if row.expires_us is not None and row.expires_us <= over_us:
            await dead_on_arrival.expired(claim, run)
            verdicts[at] = Verdict(answer=Answer.EXPIRED)
        else:
            runs[at] = run
    if claim.governed:
        runs = await _with_approvals(claim, runs)
    batch = await _prepared(claim, list(runs.values()))
    for at, run in runs.items():
        asking = _Asking(run, rows[at].expires_us, rows[at].lost_by, None)
        verdicts[at] = await _decide(claim, asking, batch)
    await _end_batch(claim, batch)
    return [verdicts[at] for at in range(len(rows))]


async def _with_approvals(claim: Claiming, runs: dict[int, Run]) -> dict[int, Run]:
    """The same runs, each with what people allowed for its message."""
    asked = [(run.message.tenant_id, run.message.id) for run in runs.values()]
    known: dict[Pair, tuple[Approved, ...]] = {}
    rows = await claim.tx.tasks.approved(claim.sub.name, asked) if asked else ()
    for tenant_id, message_id, approval_id, rule, digest in rows:
        yes = Approved(id=approval_id, rule=rule, payload_sha256=digest)
        known[tenant_id, message_id] = (*known.get((tenant_id, message_id), ()), yes)
    if not known:
        return runs
    return {
        at: msgspec.structs.replace(
            run, approvals=known.get((run.message.tenant_id, run.message.id), ())
        )
        for at, run in runs.items()
    }


# -- the verdict on a claimed row -----------------------------------------------------------------


async def _prepared(claim: Claiming, runs: Sequence[Run]) -> _Batch:
    """Take the keys of a batch, then lock the quotas that its runs are counted under."""
    lost: Mapping[Pair, Holder] = {}
    wanted = [
        Wanted(run.message.tenant_id, run.idem_key, run.message.id)
        for run in runs
        if run.idem_key is not None
    ]
    if wanted:
        lost = await claim.tx.keys.take(claim.sub.name, wanted, expiry=claim.expiry)
    if claim.book is not None:
        await claim.book.open_for([run for run in runs if claim.handles(run.message.type)])
    return _Batch(lost, [])


async def _decide(claim: Claiming, asking: _Asking, batch: _Batch) -> Verdict:
    """The verdict on a claimed row that has not expired. The questions come in this order: does
    its key belong to another message, has this worker a handler, is a quota exhausted."""
    run, delivery = asking.run, asking.delivery
    message = run.message
    holder = batch.lost.get((message.tenant_id, message.id))
    if holder is not None:
        return await _without_key(claim, asking, holder, batch)
    if not claim.handles(message.type):
        return await _pass_on(claim, asking)
    admitted = run if claim.book is None else claim.book.admit(run)
    if isinstance(admitted, PutOff):
        return await _put_off(claim, asking, admitted)
    if asking.lost_by is not None:
        await claim.tx.send(claim.tx.sql.claims.found_again, *identity_of(run))
    if asking.lost_by is not None or (delivery is not None and delivery.taken_from is not None):
        entry = reclaimed(run, claim.worker.name, delivery, asking.lost_by)
        claim.change.entries.append(entry)
    claim.change.entries.append(claimed(admitted))
    return Verdict(answer=Answer.RUN, run=admitted, delivery=delivery)


async def _end_batch(claim: Claiming, batch: _Batch) -> None:
    """Write what the verdicts of a batch have in common."""
    if batch.duplicates:
        await claim.tx.keys.end_as_duplicates(batch.duplicates)
    if claim.book is not None:
        claim.book.save()


async def _without_key(claim: Claiming, asking: _Asking, holder: Holder, batch: _Batch) -> Verdict:
    """The key belongs to another message. If that one is done, this is a duplicate; otherwise it
    waits for the key without using an attempt."""
    run, change = asking.run, claim.change
    message, identity = run.message, identity_of(run)
    if holder.state == "done":
        final = task_of(run).final(Status.DUPLICATE, first_id=holder.message_id)
        batch.duplicates.append((identity, holder.value))
        change.entries.append(final)
        change.let_go(message.tenant_id, run.subscription, None, run.lane)
        return Verdict(answer=Answer.DUPLICATE, delivery=asking.delivery)
    await _hold(claim, run, asking.candidate)
    await claim.tx.send(claim.tx.sql.claims.wait_for_key, *identity)
    # The holder may end before this is committed: the later of the two looks for waiting messages.
    change.let_go(message.tenant_id, run.subscription, run.idem_key, None)
    return Verdict(answer=Answer.WAITING, delivery=asking.delivery)


async def _pass_on(claim: Claiming, asking: _Asking) -> Verdict:
    """This worker has no handler for the message. Leave it to a worker that has one, or park it.
    Neither uses an attempt."""
    run, tx, change = asking.run, claim.tx, claim.change
    await _hold(claim, run, asking.candidate)
    if await claim.is_handled(run.message.type):
        await tx.send(tx.sql.claims.pass_on, *identity_of(run), await tx.moment())
        change.topics.add(WORK)
        return Verdict(answer=Answer.PASSED_ON, delivery=asking.delivery)
    kind = ParkKind.WORKFLOW_PENDING.value
    await tx.send(tx.sql.claims.park, *identity_of(run), kind, no_handler(run))
    change.entries.append(parked(run))
    return Verdict(answer=Answer.PARKED, run=run, delivery=asking.delivery)


async def _put_off(claim: Claiming, asking: _Asking, wait: PutOff) -> Verdict:
    """A quota is exhausted. Defer the message to the next window without using an attempt."""
    run, expires = asking.run, asking.expires_us
    await _hold(claim, run, asking.candidate)
    due_us = wait.until_us if expires is None else min(wait.until_us, expires)
    reason = f"{WAITS_FOR}{wait.quota}"
    await claim.tx.send(claim.tx.sql.claims.put_off, *identity_of(run), due_us, reason)
    claim.change.entries.append(waits_for_quota(run, wait))
    return Verdict(answer=Answer.WAITING, delivery=asking.delivery)


async def _hold(claim: Claiming, run: Run, candidate: Candidate | None) -> None:
    """Adopt: the row takes the whole message, so that the broker's copy may go."""
    if candidate is not None:
        await claim.tx.send(claim.tx.sql.claims.hold, *identity_of(run), *_body(candidate))


def _body(candidate: Candidate) -> tuple[bytes, str, int]:
    body = candidate.delivery.body
    return body, body_info(candidate), crc(body)
