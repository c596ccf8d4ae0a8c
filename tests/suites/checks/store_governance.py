"""Governance checks: one answer for each question, and no more than a quota allows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ackbone.core.approvals import (
    Answers,
    Approval,
    ApprovalFilter,
    ApprovalRecords,
    GovernanceUpkeep,
)
from ackbone.core.codecs.values import hash_payload
from ackbone.core.errors import Conflict, NotFound
from ackbone.core.events import EXPIRED
from ackbone.core.outcome import Done, Park, ParkKind, Question, Rejected, Released, Retry
from ackbone.core.quota import Limits, Quota, QuotaRecords, QuotaUse
from ackbone.core.store import Answer, Commit, Run, Usage, Worker
from ackbone.testing.harness import expect
from tests.suites.store_harness import StoreTrial, answers

HOUR_S = 3600.0
EXPIRES_S = 60.0


class Looking(ApprovalRecords, QuotaRecords, Protocol):
    """What is looked at."""


class Office(msgspec.Struct, frozen=True, kw_only=True):
    """Where people answer, and what relays do for them."""

    answers: Answers
    records: Looking
    upkeep: GovernanceUpkeep


def _question(run: Run, *, rule: str = "rule", four_eyes: bool = False) -> Park:
    question = Question(
        rule=rule,
        payload_sha256=hash_payload(run.message.payload),
        expires_s=EXPIRES_S,
        four_eyes=four_eyes,
    )
    return Park(kind=ParkKind.WAITING_APPROVAL, reason="look", question=question)


async def _asked(
    trial: StoreTrial, office: Office, worker: Worker, message_id: str, *, four_eyes: bool = False
) -> Approval:
    run = await trial.run(worker, message_id, payload={"n": 1}, idempotency_key=f"k-{message_id}")
    await trial.committed(worker, run, _question(run, four_eyes=four_eyes))
    return await _the_question(office, message_id)


async def _the_question(office: Office, message_id: str) -> Approval:
    found = await office.records.approvals_named(message_id, tenant_id=None, limit=9)
    expect(len(found) == 1, f"{len(found)} questions about {message_id}, not one")
    return found[0]


async def a_question_is_put_once(trial: StoreTrial, office: Office) -> None:
    """A finish that is repeated, because its answer was lost, asks nobody a second time."""
    worker = await trial.worker()
    run = await trial.run(worker, "a", payload={"n": 1})
    await trial.committed(worker, run, _question(run))
    (again,) = await trial.finish(worker, (run, _question(run)))
    expect(again is Commit.ALREADY, f"the repeat was {again}")
    found = await _the_question(office, "a")
    expect(found.is_pending, f"it is {found.state}")
    expect(found.payload_sha256 == hash_payload({"n": 1}).hex(), "not of this payload")
    expect(found.expires_at_us - found.asked_at_us == int(EXPIRES_S * 1e6), "not its own time")
    expect(await trial.ready(worker) == [], "it ran before anybody answered")


async def a_fenced_run_asks_nobody(trial: StoreTrial, office: Office) -> None:
    dead, alive = await trial.worker(), await trial.worker()
    run = await trial.run(dead, "a")
    await trial.die(dead)
    await trial.reap(alive)
    (commit,) = await trial.finish(dead, (run, _question(run)))
    expect(commit is Commit.FENCED, f"a late question was {commit}")
    found = await office.records.approvals(ApprovalFilter(state=None), limit=9)
    expect(not found, f"{len(found)} questions of a run that lost its claim")


async def a_yes_lets_it_run_with_its_answer(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    asked = await _asked(trial, office, worker, "a")
    said = await office.answers.approve(asked.id, by="anna", note="fine")
    expect((said.state, said.answered_by, said.note) == ("approved", "anna", "fine"), f"{said}")
    run = await trial.one_ready(worker)
    expect(run.attempt == 1, f"waiting for a person spent an attempt: {run.attempt}")
    yes = [(each.id, each.rule, each.payload_sha256) for each in run.approvals]
    expect(yes == [(asked.id, "rule", hash_payload({"n": 1}))], f"it brings along {yes}")
    await trial.committed(worker, run, Retry(0.0, "again"))
    again = await trial.one_ready(worker)
    expect(len(again.approvals) == 1, "a retry forgot the answer")
    await trial.committed(worker, again, _question(again, rule="other"))
    found = await office.records.approvals_named("a", tenant_id=None, limit=9)
    expect([each.state for each in found] == ["pending", "approved"], f"{found}")


async def a_no_ends_it(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    asked = await _asked(trial, office, worker, "a")
    said = await office.answers.reject(asked.id, by="bob")
    expect(said.state == "rejected", f"{said}")
    expect(await trial.ready(worker) == [], "what was rejected runs")
    (verdict,) = await trial.claim(
        worker, trial.candidate("a", payload={"n": 1}, idempotency_key="k-a")
    )
    expect(verdict.answer is Answer.FINAL, f"its copy is {verdict.answer}")
    twin = trial.candidate("twin", idempotency_key="k-a")
    expect(answers(await trial.claim(worker, twin)) == [Answer.RUN], "its key was not let go")


async def the_first_answer_wins(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    for n in range(10):
        asked = await _asked(trial, office, worker, f"m-{n}")
        said = await asyncio.gather(
            office.answers.approve(asked.id, by="anna"),
            office.answers.reject(asked.id, by="bob"),
            return_exceptions=True,
        )
        won = [each for each in said if isinstance(each, Approval)]
        lost = [each for each in said if isinstance(each, Conflict)]
        expect((len(won), len(lost)) == (1, 1), f"{said}")
        told = f"was {won[0].state} by {won[0].answered_by}"
        expect(told in str(lost[0]), f"the loser was told: {lost[0]}")
        runs = await trial.ready(worker)
        expect(len(runs) == (won[0].state == "approved"), f"{won[0].state}, and {len(runs)} runs")
        for run in runs:
            await trial.committed(worker, run, Done())
    try:
        await office.answers.approve("0199a1e1-0000-7000-8000-000000000000", by="anna")
        expect(False, "an answer to nothing was taken")
    except NotFound:
        return


async def four_eyes(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    asked = await _asked(trial, office, worker, "a", four_eyes=True)
    half = await office.answers.approve(asked.id, by="anna")
    expect((half.state, half.first_by) == ("pending", "anna"), f"{half}")
    expect(await trial.ready(worker) == [], "one of two was enough")
    try:
        await office.answers.approve(asked.id, by="anna")
        expect(False, "the same person said yes twice")
    except Conflict as error:
        expect("anna" in str(error), f"{error}")
    whole = await office.answers.approve(asked.id, by="bob")
    expect((whole.state, whole.answered_by) == ("approved", "bob"), f"{whole}")
    await trial.one_ready(worker)


async def silence_is_a_no(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    asked = await _asked(trial, office, worker, "a")
    expect(not await office.upkeep.has_overdue(), "overdue at once")
    trial.clock.advance(EXPIRES_S + 1)
    try:
        await office.answers.approve(asked.id, by="late")
        expect(False, "an answer after its time was taken")
    except Conflict:
        expect(await office.upkeep.has_overdue(), "nobody sees that it is overdue")
    expect(await office.upkeep.expire(worker=worker) == 1, "it did not expire")
    expect(await office.upkeep.expire(worker=worker) == 0, "it expired twice")
    expect((await _the_question(office, "a")).state == "expired", "the row says otherwise")
    expect(trial.finals("a") == ["task.rejected"], f"{trial.finals('a')}")
    expect(await trial.ready(worker) == [], "what nobody allowed runs")


# ── quotas ───────────────────────────────────────────────────────────────────────────────────────


def _count(trial: StoreTrial, **limits: float) -> None:
    """From now on a quota for each tenant and hour, for every message."""
    quota = Quota(name="q", window_s=HOUR_S, limits=msgspec.convert(limits, Limits))
    trial.store.quotas_of = lambda run: (quota,)


async def _use(office: Office, tenant: str = "default") -> QuotaUse:
    found: Sequence[QuotaUse] = await office.records.quota_use(tenant_id=tenant)
    expect(len(found) == 1, f"{len(found)} quotas in use by {tenant}, not one")
    return found[0]


async def runs_are_counted_at_the_claim(trial: StoreTrial, office: Office) -> None:
    one, two = await trial.worker(), await trial.worker()
    _count(trial, runs=3)
    first = await trial.claim(one, *(trial.candidate() for _ in range(2)))
    second = await trial.claim(two, *(trial.candidate() for _ in range(4)))
    got = answers([*first, *second])
    expect(got.count(Answer.RUN) == 3, f"three may run: {got}")
    expect(got.count(Answer.WAITING) == 3, f"three wait: {got}")
    other = trial.candidate(tenant_id="other")
    expect(answers(await trial.claim(one, other)) == [Answer.RUN], "another tenant's was used")
    use = await _use(office)
    expect((use.runs, use.waiting) == (3, 3), f"{use}")


async def use_is_counted_at_the_end(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    _count(trial, tokens=100)
    run = await trial.run(worker)
    await trial.committed(worker, run, Retry(0.0, "x"), usage=Usage(tokens=60, cost=0.5))
    again = await trial.one_ready(worker)
    spent = Usage(tokens=60, llm_calls=2, cost=0.5)
    await trial.committed(worker, again, Done(), usage=spent)
    (commit,) = await trial.finish(worker, (again, Done()), usage=spent)
    expect(commit is Commit.ALREADY, f"{commit}")
    use = await _use(office)
    seen = (use.runs, use.tokens, use.llm_calls, use.cost)
    expect(seen == (2, 120, 2, 1.0), f"a repeat counts once: {use}")
    waits = await trial.claim(worker, trial.candidate())
    expect(answers(waits) == [Answer.WAITING], "used up, and it runs")


async def what_did_not_run_is_given_back(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    _count(trial, runs=1)
    run = await trial.run(worker, "a")
    await trial.committed(worker, run, Rejected(reason="no"))
    run = await trial.run(worker, "b")
    await trial.committed(worker, run, _question(run))
    run = await trial.run(worker, "c")
    await trial.committed(worker, run, Released(after_s=1.0))
    expect((await _use(office)).runs == 0, f"{await _use(office)}")


async def waiting_spends_nothing(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    _count(trial, runs=1)
    await trial.run(worker, "first")
    await trial.claim(worker, trial.candidate("a", idempotency_key="k"))
    expect(await trial.ready(worker) == [], "it does not wait")
    twin = await trial.claim(worker, trial.candidate("b", idempotency_key="k"))
    expect(answers(twin) == [Answer.WAITING], "its key was free while it waits")
    trial.clock.advance(HOUR_S)
    run = await trial.one_ready(worker)
    expect((run.message.id, run.attempt, run.failures) == ("a", 1, 0), f"{run}")
    await trial.committed(worker, run, Done())
    trial.expect_one_final_each()


async def what_waits_for_a_quota_expires_in_time(trial: StoreTrial, office: Office) -> None:
    """Not when the next window begins."""
    worker = await trial.worker()
    _count(trial, runs=1)
    await trial.run(worker, "first")
    waits = await trial.claim(worker, trial.candidate("a", ttl_s=60))
    expect(answers(waits) == [Answer.WAITING], f"{answers(waits)}")
    trial.clock.advance(61)
    verdicts = await trial.store.claim_ready(trial.sub, limit=100, worker=worker)
    expect(answers(verdicts) == [Answer.EXPIRED], f"{answers(verdicts)}")
    expect(trial.finals("a") == [EXPIRED], f"{trial.finals('a')}")


async def a_backlog_is_spread(trial: StoreTrial, office: Office) -> None:
    """Each window moves as many as may run in it, and no more; the oldest first."""
    worker = await trial.worker()
    _count(trial, runs=2)
    await trial.claim(worker, *(trial.candidate(f"m{n}") for n in range(8)))
    for hour in range(1, 4):
        trial.clock.advance(HOUR_S)
        verdicts = await trial.store.claim_ready(trial.sub, limit=100, worker=worker)
        got = [each.run.message.id for each in verdicts if each.run is not None]
        expect(got == [f"m{2 * hour}", f"m{2 * hour + 1}"], f"hour {hour}: {got}")
        expect(len(verdicts) == 2, f"hour {hour} moved {len(verdicts)}")


async def nobody_waits_for_a_window_of_the_old_clock(trial: StoreTrial, office: Office) -> None:
    """The clock is set back by a day, while messages wait for the next window."""
    worker = await trial.worker()
    _count(trial, runs=1)
    await trial.claim(worker, trial.candidate("m0"), trial.candidate("m1"))
    trial.clock.jump_wall(-24 * HOUR_S)
    await trial.claim(worker, trial.candidate("m2"), trial.candidate("m3"))
    trial.clock.advance(HOUR_S)
    verdicts = await trial.store.claim_ready(trial.sub, limit=100, worker=worker)
    got = sorted(verdict.answer for verdict in verdicts)
    expect(got == [Answer.RUN, Answer.WAITING], f"an hour later: {got}")


async def changed_quotas_are_looked_at_again(trial: StoreTrial, office: Office) -> None:
    worker = await trial.worker()
    _count(trial, runs=1)
    await trial.claim(worker, *(trial.candidate() for _ in range(5)))
    _count(trial, runs=4)
    expect(await trial.ready(worker) == [], "nobody told it")
    expect(await office.upkeep.quotas_changed() == 4, "four wait")
    expect(len(await trial.ready(worker)) == 3, "four may run, and one did")
