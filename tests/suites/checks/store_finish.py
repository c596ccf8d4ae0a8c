"""Store checks: what became of a run, once and only once."""

from __future__ import annotations

from ackbone.core.events import FAILED, SUCCEEDED
from ackbone.core.outcome import (
    NO_HANDLER,
    Dead,
    Discarded,
    Done,
    Expired,
    Outcome,
    Park,
    ParkKind,
    Rejected,
    Released,
    Retry,
)
from ackbone.core.store import Answer, Commit, Company, Reply, Run
from ackbone.testing.harness import expect
from tests.suites.store_harness import CRASH_BUDGET, StoreTrial, expect_answers


async def a_repeat_is_already(trial: StoreTrial) -> None:
    """The answer got lost and the batch is sent again."""
    worker = await trial.worker()
    runs = [await trial.run(worker, f"m{n}") for n in range(3)]
    ends: list[tuple[Run, Outcome]] = [
        (runs[0], Done()),
        (runs[1], Dead(reason="r")),
        (runs[2], Retry(5.0, "later")),
    ]
    expect(await trial.finish(worker, *ends) == [Commit.COMMITTED] * 3, "the first time")
    expect(await trial.finish(worker, *ends) == [Commit.ALREADY] * 3, "the repeat")
    trial.expect_one_final_each()


async def a_run_that_ends_twice_in_one_batch_ends_once(trial: StoreTrial) -> None:
    """A claim that a crash of the database took back may be granted again while its run goes on:
    two runs with one token."""
    worker = await trial.worker()
    runs = [await trial.run(worker, f"m{n}") for n in range(4)]
    commits = await trial.finish(
        worker,
        (runs[0], Done()),
        (runs[1], Done()),
        (runs[0], Done()),
        (runs[1], Retry(5.0, "later")),
        (runs[2], Retry(5.0, "later")),
        (runs[2], Done()),
        (runs[3], Done()),
    )
    first, repeat = Commit.COMMITTED, Commit.ALREADY
    wanted = [first, first, repeat, repeat, first, repeat, first]
    expect(commits == wanted, f"{commits}")
    finals = [trial.finals(f"m{n}") for n in range(4)]
    expect(finals == [[SUCCEEDED], [SUCCEEDED], [], [SUCCEEDED]], f"{finals}")


async def an_old_and_a_new_claim_in_one_batch(trial: StoreTrial) -> None:
    """Only the new one may commit, whichever comes first."""
    worker = await trial.worker()
    for name, old_first in (("a", True), ("b", False)):
        old = await trial.run(worker, name)
        await trial.committed(worker, old, Retry(0.0, "again"))
        new = await trial.one_ready(worker)
        ends: list[tuple[Run, Outcome]] = [(old, Done()), (new, Done())]
        wanted = [Commit.FENCED, Commit.COMMITTED]
        if not old_first:
            ends.reverse()
            wanted.reverse()
        commits = await trial.finish(worker, *ends)
        expect(commits == wanted, f"{name}: {commits}")
        expect(trial.finals(name) == [SUCCEEDED], f"{name}: {trial.finals(name)}")


async def the_first_outcome_stands(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "m")
    await trial.committed(worker, run, Done())
    (commit,) = await trial.finish(worker, (run, Dead(reason="changed my mind")))
    expect(commit is Commit.ALREADY, f"{commit}")
    expect(trial.finals("m") == [SUCCEEDED], f"{trial.finals('m')}")


async def a_late_result_is_fenced(trial: StoreTrial) -> None:
    """A worker stood still, was declared dead, another took over: only that one may commit."""
    late, other = await trial.worker(), await trial.worker()
    run = await trial.run(late, "m")
    await trial.die(late)
    found = await trial.reap(other)
    expect(list(found.workers) == [late.worker_id], f"{found}")
    (verdict,) = await trial.claim(other, trial.candidate("m"))
    again = trial.granted(verdict)
    (commit,) = await trial.finish(late, (run, Done()))
    expect(commit is Commit.FENCED, f"the late result was {commit}")
    await trial.committed(other, again, Done())
    (commit,) = await trial.finish(late, (run, Done()))
    expect(commit is Commit.FENCED, f"the late result was {commit}")
    trial.expect_one_final_each()


async def an_old_claim_of_the_same_worker_is_fenced(trial: StoreTrial) -> None:
    worker = await trial.worker()
    old = await trial.run(worker, "m")
    await trial.committed(worker, old, Retry(0.0, "again"))
    new = await trial.one_ready(worker)
    (commit,) = await trial.finish(worker, (old, Done()))
    expect(commit is Commit.FENCED, f"{commit}")
    await trial.committed(worker, new, Done())


async def an_old_claim_of_what_stayed_where_it_was_is_fenced(trial: StoreTrial) -> None:
    """Only the token differs: worker, row and holder of the message are the same for both."""
    worker = await trial.worker()
    old = await trial.run(worker, "broker")
    await trial.committed(worker, old, Released())
    (verdict,) = await trial.claim(worker, trial.candidate("broker"))
    pairs = [(old, trial.granted(verdict))]
    first = await trial.run(worker, "store")
    await trial.committed(worker, first, Retry(0.0, "into the store"))
    old = await trial.one_ready(worker)
    await trial.committed(worker, old, Retry(0.0, "again"))
    pairs.append((old, await trial.one_ready(worker)))
    for old, new in pairs:
        name = new.message.id
        for outcome in (Done(), Dead(reason="r")):
            (commit,) = await trial.finish(worker, (old, outcome))
            expect(commit is Commit.FENCED, f"{name}, {outcome}: {commit}")
        expect(trial.finals(name) == [], f"{name}: {trial.finals(name)}")
        await trial.committed(worker, new, Done())


async def one_fenced_item_harms_no_other(trial: StoreTrial) -> None:
    late, worker = await trial.worker(), await trial.worker()
    gone = await trial.run(late, "gone")
    await trial.die(late)
    await trial.reap(worker)
    good = [await trial.run(worker, f"m{n}") for n in range(4)]
    commits = await trial.finish(
        worker,
        (good[0], Done()),
        (good[1], Retry(1.0, "r")),
        (gone, Done()),
        (good[2], Done()),
        (good[3], Dead(reason="r")),
    )
    wanted = [Commit.COMMITTED, Commit.COMMITTED, Commit.FENCED, Commit.COMMITTED, Commit.COMMITTED]
    expect(commits == wanted, f"{commits}")


async def one_unstorable_item_harms_no_other(trial: StoreTrial) -> None:
    """What no row can hold ends as a dead letter; the others end as they ended."""
    worker = await trial.worker()
    runs = [await trial.run(worker, f"m{n}") for n in range(5)]
    bad = await trial.run(worker, "bad")
    ends: list[tuple[Run, Outcome]] = [(run, Done()) for run in runs]
    ends.insert(2, (bad, Retry(after_s=1e300, reason="never")))
    commits = await trial.finish(worker, *ends)
    wanted = [Commit.COMMITTED] * 6
    wanted[2] = Commit.BURIED
    expect(commits == wanted, f"{commits}")
    expect(trial.finals("bad") == [FAILED], f"{trial.finals('bad')}")
    expect(all(trial.finals(run.message.id) == [SUCCEEDED] for run in runs), "a neighbour")


async def a_repeat_of_what_was_buried_is_buried(trial: StoreTrial) -> None:
    """Whoever repeats a success that became a dead letter must not hear that it was committed."""
    worker = await trial.worker()
    good, bad = await trial.run(worker, "good"), await trial.run(worker, "bad")
    reply = Reply(channel="no text \ud800", recipient="ann", content="hi")
    for wanted in ([Commit.BURIED], [Commit.BURIED]):
        commits = await trial.finish(worker, (bad, Done()), replies=[reply])
        expect(commits == wanted, f"{commits}")
    mixed = await trial.finish(worker, (good, Done()), (bad, Done()))
    expect(mixed == [Commit.COMMITTED, Commit.BURIED], f"{mixed}")
    expect(trial.finals("bad") == [FAILED], f"{trial.finals('bad')}")
    trial.expect_one_final_each()


async def a_retry_waits_in_the_store(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "m", payload="kept")
    await trial.committed(worker, run, Retry(60.0, "not yet"))
    expect_answers(await trial.claim(worker, trial.candidate("m", payload="kept")), Answer.KNOWN)
    expect(await trial.ready(worker) == [], "it is not due")
    due = await trial.store.next_due_s(trial.sub)
    expect(due is not None and 59 <= due <= 60, f"due in {due} s")
    trial.clock.advance(60)
    again = await trial.one_ready(worker)
    expect(again.message.payload == "kept", "another message")
    expect((again.attempt, again.failures, again.crashes) == (2, 1, 0), f"{again}")
    expect([h["error"] for h in again.history] == ["not yet"], f"{again.history}")
    await trial.committed(worker, again, Done())
    expect(await trial.store.next_due_s(trial.sub) is None, "nothing waits any more")


async def a_crash_spends_no_retry(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "m")
    for crash in range(1, CRASH_BUDGET + 1):
        await trial.committed(worker, run, Retry(0.0, "died", crashed=True))
        company = Company.FEW if crash >= 2 else Company.ANY
        run = await trial.one_ready(worker, company=company)
        expect((run.crashes, run.failures) == (crash, 0), f"{run}")
    await trial.committed(worker, run, Retry(0.0, "died", crashed=True))
    expect(trial.finals("m") == [FAILED], "its crash budget is spent")


async def every_end_is_an_end(trial: StoreTrial) -> None:
    worker = await trial.worker()
    outcomes: list[Outcome] = [
        Done(1),
        Dead(reason="r"),
        Rejected(reason="r"),
        Expired(),
        Discarded("r"),
    ]
    for n, outcome in enumerate(outcomes):
        run = await trial.run(worker, f"m{n}")
        await trial.committed(worker, run, outcome)
        expect_answers(await trial.claim(worker, trial.candidate(f"m{n}")), Answer.FINAL)
        expect(len(trial.finals(f"m{n}")) == 1, f"{outcome}: {trial.finals(f'm{n}')}")
    expect(await trial.ready(worker) == [], "nothing is left to do")


async def parked_until_resumed(trial: StoreTrial) -> None:
    worker = await trial.worker()
    for message_id, reason in (("waits", f"{NO_HANDLER} 't'"), ("said", "not approved")):
        run = await trial.run(worker, message_id)
        await trial.committed(worker, run, Park(ParkKind.WORKFLOW_PENDING, reason))
    expect(await trial.ready(worker) == [], "parked messages are not due")

    async def resume(*types: str) -> int:
        return await trial.store.resume_parked(
            ParkKind.WORKFLOW_PENDING, types, subscription=trial.sub.name, worker=worker
        )

    expect(await resume("another") == 0, "no handler of its type appeared")
    expect(await resume("t") == 1, "the one that waited for a handler, not the other")
    run = await trial.one_ready(worker)
    expect(run.message.id == "waits", run.message.id)
    expect((run.attempt, run.failures) == (1, 0), "waiting spends no attempt")


async def handed_back_unspent(trial: StoreTrial) -> None:
    """To the broker, or, with a wait, to the store itself."""
    worker = await trial.worker()
    run = await trial.run(worker, "m")
    await trial.committed(worker, run, Released())
    (verdict,) = await trial.claim(worker, trial.candidate("m"))
    again = trial.granted(verdict)
    expect((again.attempt, again.failures) == (1, 0), f"{again}")
    await trial.committed(worker, again, Released(after_s=30.0))
    expect_answers(await trial.claim(worker, trial.candidate("m")), Answer.KNOWN)
    expect(await trial.ready(worker) == [], "it has to wait")
    trial.clock.advance(30)
    last = await trial.one_ready(worker)
    expect((last.attempt, last.failures) == (1, 0), f"{last}")
    await trial.committed(worker, last, Done())
