"""Claims: which worker may run which message. One transaction per batch, one verdict per item.

Why it holds: a row gets into `running` only through a compare-and-set here, and the pair
(worker_id, epoch) on it is new each time. Batches lock tasks before keys, and both sorted, so that
two of them wait for each other in one order. A claim of nothing but runs need not be synced: if a
power cut takes it back, its run is refused at the end, and the message, which the broker still has,
runs again. Any other answer lets the broker's copy go, and its claim is synced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ackbone.core import events
from ackbone.core.broker import Subscription
from ackbone.core.clock import to_us
from ackbone.core.errors import DecodeError, StoreCorrupt
from ackbone.core.ids import uuid7_block
from ackbone.core.message import Message
from ackbone.core.outcome import FINAL, Status
from ackbone.core.quota import WAITS_FOR
from ackbone.core.store import Answer, Candidate, Company, Run, Token, Verdict, lets_go
from ackbone.store.claimed import claimed, created, failed_elsewhere, waits_for_quota
from ackbone.store.crash import crashes_of
from ackbone.store.outcomes import final_data
from ackbone.store.quota_book import PutOff
from ackbone.store.stored import ENDED, none_of, what_differs

from . import arrays, ends, lanes, tasks
from .approvals import approved_of
from .arrays import moment
from .claim_entries import pass_on, reclaim
from .claiming import Claiming
from .keys import Holder, Wanted, end_as_duplicates, free_keys, take_keys
from .tasks import NOW, PK, Existing, Identity, Ready, Task

_HEAD = (
    "(a.lane IS NULL OR NOT EXISTS (SELECT 1 FROM queue_executions b"
    " WHERE b.tenant_id = a.tenant_id AND b.subscription = a.subscription AND b.lane = a.lane"
    f" AND b.lane_seq < a.lane_seq AND {none_of(*ENDED, column='b.status')}))"
)
CLAIM_READY = {
    rule: "WITH due AS MATERIALIZED (SELECT d.* FROM (VALUES (3), (2), (1), (0)) p(priority)"
    " CROSS JOIN LATERAL (SELECT a.tenant_id, a.subscription, a.message_id FROM queue_executions a"
    " WHERE a.subscription = $1 AND a.status = 'ready' AND a.priority = p.priority"
    f" AND a.due_at <= {NOW} AND a.crashes BETWEEN $3::int AND $4::int{chosen} AND {_HEAD}"
    " ORDER BY a.due_at LIMIT $5::int FOR UPDATE OF a SKIP LOCKED) d LIMIT $5::int)"
    " UPDATE queue_executions q SET status = 'running', worker_id = $2::bigint,"
    " epoch = q.epoch + 1, attempt = q.attempt + 1 FROM due WHERE q.tenant_id = due.tenant_id"
    " AND q.subscription = due.subscription AND q.message_id = due.message_id"
    f" RETURNING {tasks.RUN_COLUMNS}"
    for rule, chosen in (
        ("all", ""),
        ("only", " AND a.event_name = ANY($6::text[])"),
        ("but", " AND a.event_name <> ALL($6::text[])"),
    )
}
NEXT_DUE = (
    f"SELECT extract(epoch FROM min(d.due_at) - {NOW})::float8"
    " FROM (VALUES (3), (2), (1), (0)) p(priority) CROSS JOIN LATERAL ("
    "SELECT a.due_at FROM queue_executions a WHERE a.subscription = $1 AND a.status = 'ready'"
    f" AND a.priority = p.priority AND a.due_at > {NOW} ORDER BY a.due_at LIMIT 1) d"
)
_COUNT = f"UPDATE queue_executions SET attempt = $4::int, retry_count = $5::int WHERE {PK}"
_PUT_OFF = (
    f"UPDATE queue_executions SET status = 'ready', due_at = {moment('$4::bigint')},"
    f" worker_id = NULL, attempt = attempt - 1, error_message = $5 WHERE {PK}"
)
_WAIT_FOR_KEY = (
    "UPDATE queue_executions SET status = 'waiting_key', worker_id = NULL, attempt = attempt - 1"
    f" WHERE {PK}"
)


class _Granted(NamedTuple):
    """A row that CLAIM returned."""

    at: int
    """Its place in the batch."""
    task: Task
    run: Run
    lost_by: str | None
    """The worker that was running it when it died."""


class Claims:
    """The claim half of the protocol. Each method runs inside one transaction."""

    def __init__(self, *, isolates: bool) -> None:
        self._isolates = isolates
        """Messages that crashed their workers run in child processes."""
        self._unsure: dict[Identity, Run] = {}
        """Granted by a transaction of which nobody knows whether it was committed."""

    # -- broker copies ----------------------------------------------------------------------------

    async def admit(self, claim: Claiming, candidates: Sequence[Candidate]) -> list[Verdict]:
        """Claim what is new; say of the rest what it is."""
        new: dict[tuple[str, str], tuple[int, Task]] = {}
        rest: list[tuple[int, Candidate, Message]] = []
        broken: list[tuple[int, Candidate]] = []
        for at, (candidate, row_id) in enumerate(
            zip(candidates, uuid7_block(len(candidates)), strict=True)
        ):
            message = candidate.message
            if message is None:
                broken.append((at, candidate))
            elif (message.tenant_id, message.id) in new:
                rest.append((at, candidate, message))
            else:
                task = tasks.task(claim.sub, candidate, message, row_id, claim.ahead)
                new[task.identity] = (at, task)
        verdicts: dict[int, Verdict] = {}
        granted = await self._claim(claim, new, rest)
        await claim.tx.require_alive(claim.worker_id)
        await self._grant(claim, granted, verdicts)
        await self._know(claim, rest, verdicts)
        for at, candidate in broken:
            claim.change.entries += await ends.undecodable(
                claim.tx, claim.sub, candidate, claim.worker_id
            )
            verdicts[at] = Verdict(answer=Answer.DEAD, delivery=candidate.delivery)
        answered = [verdicts[at] for at in range(len(candidates))]
        claim.tx.if_unknown = lambda: self._doubt(answered)
        claim.change.durable = lets_go(answered)
        return answered

    async def _claim(
        self,
        claim: Claiming,
        new: dict[tuple[str, str], tuple[int, Task]],
        rest: list[tuple[int, Candidate, Message]],
    ) -> list[_Granted]:
        """Write the rows; where one was there before, its candidate is one of the rest."""
        if not new:
            return []
        _, most_crashes = crashes_of(Company.ANY, isolates=self._isolates)
        found = {
            (row[0], row[1]): row
            for row in await claim.tx.rows(
                tasks.CLAIM,
                claim.sub.name,
                claim.sub.queue,
                str(claim.worker_id),
                str(most_crashes + 1),
                *tasks.claim_values([new[identity][1] for identity in sorted(new)]),
            )
        }
        now_us = await claim.tx.moment()
        granted: list[_Granted] = []
        for identity, (at, task) in new.items():
            row = found.get(identity)
            if row is None:
                rest.append((at, task.candidate, task.message))
                continue
            run = tasks.claimed_run(claim.sub, task, row, claim.worker_id, now_us)
            counted = failed_elsewhere(claim.sub, run)
            if counted is not run:
                values = (counted.attempt, counted.failures)
                await claim.tx.send(_COUNT, *_of(run), *(str(value) for value in values))
            granted.append(_Granted(at, task, counted, row[7]))
        return granted

    async def _grant(
        self,
        claim: Claiming,
        rows: Sequence[_Granted],
        verdicts: dict[int, Verdict],
    ) -> None:
        """Runs for claimed rows, less those that are over time or whose key is another's."""
        now_us = await claim.tx.moment()
        timely = [row.run for row in rows if not claim.is_over(row.task.expires_us, now_us)]
        lost = await _take(claim, timely)
        book = await claim.book([run for run in timely if claim.is_mine(run)])
        entries = claim.change.entries
        new = [(t.message, t.created_us) for _, t, run, _ in rows if run.token.epoch == 1]
        entries += created(claim.sub, new)
        for at, task, run, lost_by in rows:
            delivery = task.candidate.delivery
            identity = (run.message.tenant_id, run.message.id)
            if claim.is_over(task.expires_us, now_us):
                await _expire(claim, run, now_us)
                verdicts[at] = Verdict(answer=Answer.EXPIRED, delivery=delivery)
            elif identity in lost:
                await claim.tx.send(
                    tasks.HOLD, *tasks.hold_values(claim.sub, task.candidate, task.message)
                )
                answer = await _without_key(claim, run, lost[identity])
                verdicts[at] = Verdict(answer=answer, delivery=delivery)
            elif not claim.is_mine(run):
                hold = tasks.hold_values(claim.sub, task.candidate, task.message)
                await claim.tx.send(tasks.HOLD, *hold)
                verdicts[at] = await pass_on(claim, run, delivery)
            elif isinstance(admitted := run if book is None else book.admit(run), PutOff):
                hold = tasks.hold_values(claim.sub, task.candidate, task.message)
                await claim.tx.send(tasks.HOLD, *hold)
                await _put_off(claim, run, admitted, task.expires_us)
                verdicts[at] = Verdict(answer=Answer.WAITING, delivery=delivery)
            else:
                if delivery.taken_from is not None or lost_by is not None:
                    await reclaim(claim, admitted, delivery, lost_by)
                entries.append(claimed(admitted))
                verdicts[at] = Verdict(answer=Answer.RUN, run=admitted, delivery=delivery)
        if book is not None:
            book.close()

    async def _know(
        self,
        claim: Claiming,
        rest: Sequence[tuple[int, Candidate, Message]],
        verdicts: dict[int, Verdict],
    ) -> None:
        """Copies of tasks that exist already, whose rows the claim has locked."""
        if not rest:
            return
        found = {
            (row[0], row[1]): Existing(*row)
            for row in await claim.tx.rows(
                tasks.FIND,
                claim.sub.name,
                arrays.texts([message.tenant_id for _, _, message in rest]),
                arrays.texts([message.id for _, _, message in rest]),
            )
        }
        for at, candidate, message in sorted(rest, key=lambda each: each[0]):
            row = found.get((message.tenant_id, message.id))
            if row is None:
                raise StoreCorrupt(f"task {message.id} vanished inside its own transaction")
            verdicts[at] = await self._known(claim, candidate, message, row)

    async def _known(
        self, claim: Claiming, candidate: Candidate, message: Message, row: Existing
    ) -> Verdict:
        delivery = candidate.delivery
        tx, sub = claim.tx, claim.sub
        answer = Answer.KNOWN
        if differs := what_differs(sub, candidate, message, row):
            claim.change.entries += await ends.id_conflict(
                tx, sub, candidate, message, differs, claim.worker_id
            )
            answer = Answer.DEAD
        elif row.status in FINAL:
            if row.status == Status.FAILED:
                await ends.complete_letter(tx, sub, candidate, message)
            elif row.status == Status.SUCCEEDED:
                claim.change.again.add((message.tenant_id, sub.name, message.id))
            answer = Answer.FINAL
        elif row.status == Status.OPEN:  # crashed its worker too often to run among others
            await tx.send(tasks.HOLD, *tasks.hold_values(sub, candidate, message))
            await tx.send(tasks.KEEP_SUSPECT, message.tenant_id, sub.name, message.id)
            answer = Answer.WAITING
        elif (run := self._mine(claim, message, row)) is not None:
            return Verdict(answer=Answer.RUN, run=run, delivery=delivery)
        elif row.held == "broker":
            await tx.send(tasks.HOLD, *tasks.hold_values(sub, candidate, message))
            answer = Answer.ADOPTED
        return Verdict(answer=answer, delivery=delivery)

    def _mine(self, claim: Claiming, message: Message, row: Existing) -> Run | None:
        """The run that an earlier call granted, if its commit was made after all."""
        run = self._unsure.get((message.tenant_id, claim.sub.name, message.id))
        if run is None or row.status != Status.RUNNING:
            return None
        same = (row.worker_id, row.epoch) == (run.token.worker_id, run.token.epoch)
        return run if same and run.token.worker_id == claim.worker_id else None

    def answered(self, sub: Subscription, candidates: Sequence[Candidate] | None) -> None:
        """The answer of a claim was committed: nothing about these messages is unsure any more.

        None: of `claim_ready`, which asks for all that the store holds.
        """
        if not self._unsure:
            return
        asked = {c.message.id for c in candidates or () if c.message is not None}
        for identity, run in list(self._unsure.items()):
            mine = run.delivery is None if candidates is None else identity[2] in asked
            if identity[1] == sub.name and mine:
                del self._unsure[identity]

    def _doubt(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            run = verdict.run
            if run is not None and verdict.answer is Answer.RUN:
                self._unsure[(run.message.tenant_id, run.subscription, run.message.id)] = run

    # -- lanes ------------------------------------------------------------------------------------

    async def adopt_in_order(
        self, claim: Claiming, candidates: Sequence[Candidate]
    ) -> list[Verdict] | None:
        """Take keyed messages over, in broker order. All of them may be acknowledged then."""
        if not await lanes.own_source(claim.tx, claim.sub.name, claim.worker_id):
            return None
        rest, written = await lanes.append(claim.tx, claim.sub, candidates, claim.ahead)
        claim.change.lanes |= written
        others = {id(candidate) for candidate in rest}
        new = [c.message for c in candidates if c.message is not None and id(c) not in others]
        claim.change.entries += created(claim.sub, [(m, to_us(m.created_at)) for m in new])
        known = [(at, c, c.message) for at, c in enumerate(rest) if c.message is not None]
        if known:  # the same rows are asked for as by a claim, and locked as by one
            await claim.tx.rows(
                _LOCK, claim.sub.name, *_columns(sorted((m.tenant_id, m.id) for _, _, m in known))
            )
        await self._know(claim, known, {})
        for candidate in rest:
            if candidate.message is None:
                claim.change.entries += await ends.undecodable(
                    claim.tx, claim.sub, candidate, claim.worker_id
                )
        return [Verdict(answer=Answer.WAITING, delivery=c.delivery) for c in candidates]

    # -- what the store holds ---------------------------------------------------------------------

    async def claim_ready(self, claim: Claiming, limit: int, company: Company) -> list[Verdict]:
        """Due tasks, the highest priority first: retries, resumed, adopted, lane heads."""
        again = await self._granted_before(claim)
        low, high = crashes_of(company, isolates=self._isolates)
        choice = await claim.choice()
        found = await claim.tx.rows(
            CLAIM_READY[choice.rule],
            claim.sub.name,
            str(claim.worker_id),
            str(low),
            str(high),
            str(max(0, limit - len(again))),
            *(() if choice.rule == "all" else (arrays.texts(choice.types),)),
        )
        await claim.tx.require_alive(claim.worker_id)
        if found:
            await claim.tx.look_at_clock()
        rows = sorted((Ready(*row) for row in found), key=lambda r: (-r.priority, r.due_at))
        verdicts = [*again, *(await self._ready(claim, rows) if rows else [])]
        claim.tx.if_unknown = lambda: self._doubt(verdicts)
        return verdicts

    async def _ready(self, claim: Claiming, rows: Sequence[Ready]) -> list[Verdict]:
        now_us = await claim.tx.moment()
        runs: dict[int, Run] = {}
        verdicts: dict[int, Verdict] = {}
        entries = claim.change.entries
        for at, row in enumerate(rows):
            expires_us = None if row.expires_at is None else to_us(row.expires_at)
            try:
                run = tasks.stored_run(claim.sub, row, claim.worker_id, now_us)
            except (StoreCorrupt, DecodeError) as error:
                entries += await ends.unreadable(claim.tx, claim.sub, row, error, now_us)
                _let_go(claim, row.tenant_id, row.message_id, row.key, row.lane)
                verdicts[at] = Verdict(answer=Answer.DEAD)
                continue
            if claim.is_over(expires_us, now_us):
                await _expire(claim, run, now_us)
                verdicts[at] = Verdict(answer=Answer.EXPIRED)
            else:
                runs[at] = run
        lost = await _take(claim, list(runs.values()))
        if claim.governed:
            runs = await _with_approvals(claim, runs)
        book = await claim.book([run for run in runs.values() if claim.is_mine(run)])
        for at, run in runs.items():
            holder = lost.get((run.message.tenant_id, run.message.id))
            if holder is not None:
                verdicts[at] = Verdict(answer=await _without_key(claim, run, holder))
            elif not claim.is_mine(run):
                verdicts[at] = await pass_on(claim, run, None)
            elif isinstance(admitted := run if book is None else book.admit(run), PutOff):
                expires = rows[at].expires_at
                await _put_off(claim, run, admitted, None if expires is None else to_us(expires))
                verdicts[at] = Verdict(answer=Answer.WAITING)
            else:
                if rows[at].lost_by is not None:
                    await reclaim(claim, admitted, None, rows[at].lost_by)
                entries.append(claimed(admitted))
                verdicts[at] = Verdict(answer=Answer.RUN, run=admitted)
        if book is not None:
            book.close()
        return [verdicts[at] for at in range(len(rows))]

    async def _granted_before(self, claim: Claiming) -> list[Verdict]:
        """Runs of a claim whose answer was lost, and which was made after all.

        Their rows are asked for by their names alone, and locked: a claim that is being committed
        still is waited for. By its status such a row would not be found yet, and never be again.
        """
        asked = {
            (tenant_id, message_id): run
            for (tenant_id, sub, message_id), run in self._unsure.items()
            if sub == claim.sub.name and run.delivery is None
        }
        if not asked:
            return []
        found = await claim.tx.rows(_LOCK, claim.sub.name, *_columns(sorted(asked)))
        mine = {
            (tenant_id, message_id): Token(worker_id, epoch)
            for tenant_id, message_id, worker_id, epoch, status in found
            if status == Status.RUNNING and worker_id == claim.worker_id
        }
        return [
            Verdict(answer=Answer.RUN, run=asked[identity])
            for identity, token in mine.items()
            if token == asked[identity].token
        ]


_LOCK = (
    "SELECT t.tenant_id, t.message_id, t.worker_id, t.epoch, t.status"
    " FROM unnest($2::text[], $3::text[]) u(tenant, message) JOIN queue_executions t"
    " ON t.tenant_id = u.tenant AND t.subscription = $1 AND t.message_id = u.message"
    " FOR UPDATE OF t"
)


def _of(run: Run) -> Identity:
    return run.message.tenant_id, run.subscription, run.message.id


def _columns(pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
    return arrays.texts([first for first, _ in pairs]), arrays.texts([last for _, last in pairs])


async def _take(claim: Claiming, runs: Sequence[Run]) -> dict[tuple[str, str], Holder]:
    """The keys of these runs; returns the lost ones by (tenant, message)."""
    wanted = [
        Wanted(run.message.tenant_id, run.idem_key, run.message.id)
        for run in runs
        if run.idem_key is not None
    ]
    if not wanted:
        return {}
    return await take_keys(claim.tx, claim.sub.name, wanted, expiry=claim.expiry)


async def _with_approvals(claim: Claiming, runs: dict[int, Run]) -> dict[int, Run]:
    """The same runs; those of messages that a person said yes to know of it."""
    asked = [(run.message.tenant_id, run.message.id) for run in runs.values()]
    known = await approved_of(claim.tx, claim.sub.name, asked) if asked else {}
    if not known:
        return runs
    return {
        at: msgspec.structs.replace(
            run, approvals=known.get((run.message.tenant_id, run.message.id), ())
        )
        for at, run in runs.items()
    }


async def _put_off(claim: Claiming, run: Run, wait: PutOff, expires_us: int | None) -> None:
    """A quota of its is used up: it waits for another window, and spends nothing."""
    due = wait.until_us if expires_us is None else min(wait.until_us, expires_us)
    await claim.tx.send(_PUT_OFF, *_of(run), str(due), f"{WAITS_FOR}{wait.quota}")
    claim.change.entries.append(waits_for_quota(run, wait))


async def _expire(claim: Claiming, run: Run, now_us: int) -> None:
    claim.change.entries += await ends.expired(claim.tx, run, now_us)
    _let_go(claim, run.message.tenant_id, run.message.id, run.idem_key, run.lane)


def _let_go(
    claim: Claiming, tenant_id: str, message_id: str, key: str | None, lane: str | None
) -> None:
    if key is not None:
        free_keys(claim.tx, [((tenant_id, claim.sub.name, key), message_id)])
    claim.change.let_go(tenant_id, claim.sub.name, key, lane)


async def _without_key(claim: Claiming, run: Run, holder: Holder) -> Answer:
    """Its key belongs to another message: a duplicate if that one is done, else it waits."""
    message = run.message
    identity = (message.tenant_id, run.subscription, message.id)
    if holder.state == "done":
        data: dict[str, Any] = final_data(
            run.queue,
            message.tenant_id,
            message.id,
            message.type,
            message.trace_id,
            Status.DUPLICATE,
        )
        data["first_id"] = holder.message_id
        await end_as_duplicates(claim.tx, [(*identity, holder.value)])
        claim.change.entries.append((*identity, events.DUPLICATE, data))
        claim.change.let_go(message.tenant_id, run.subscription, None, run.lane)
        return Answer.DUPLICATE
    await claim.tx.send(_WAIT_FOR_KEY, *identity)
    # Its holder may end before this is committed: whoever is later looks.
    claim.change.let_go(message.tenant_id, run.subscription, run.idem_key, None)
    return Answer.WAITING
