"""Store checks: workers with different handlers on one subscription; who takes over from whom."""

from __future__ import annotations

from ackbone.core.events import CLAIMED, LOST, PARKED, RECLAIMED, RESUMED
from ackbone.core.outcome import Done, ParkKind, Retry
from ackbone.core.store import Answer, Company, Offers, Run, Worker
from ackbone.store.claiming import GRACE_S
from ackbone.testing.harness import expect
from tests.suites.store_harness import StoreTrial, expect_answers


async def _worker(trial: StoreTrial, *types: str, name: str = "suite") -> Worker:
    """A worker that has handlers for these types, in both subscriptions of the trial."""
    of_each = {sub.name: frozenset(types) for sub in (trial.sub, trial.lanes)}
    return await trial.store.register(name, Offers(types=of_each))


def _told(trial: StoreTrial, message_id: str, *kinds: str) -> list[str]:
    return [e.type for e in trial.events if e.task_id == message_id and e.type in kinds]


async def _resume(trial: StoreTrial, worker: Worker, *types: str) -> int:
    return await trial.store.resume_parked(
        ParkKind.WORKFLOW_PENDING, types, subscription=trial.sub.name, worker=worker
    )


async def another_workers_types_are_left_to_it(trial: StoreTrial) -> None:
    one, other = await _worker(trial, "a"), await _worker(trial, "b")
    batch = [trial.candidate("a1", type="a"), trial.candidate("b1", type="b")]
    expect_answers(await trial.claim(one, *batch), Answer.RUN, Answer.PASSED_ON)
    expect(_told(trial, "b1", CLAIMED, PARKED) == [], "nobody ran it, and it is not parked")
    expect(await trial.ready(one) == [], "it has no handler for that")
    run = await trial.one_ready(other)
    expect((run.message.id, run.attempt, run.failures) == ("b1", 1, 0), f"{run}")
    expect(run.token.epoch == 2, "nobody else claimed it in between, not even to give it back")
    expect_answers(await trial.claim(one, trial.candidate("b1", type="b")), Answer.KNOWN)
    await trial.committed(other, run, Retry(0.0, "again"))
    expect(await trial.ready(one) == [], "nor for its next attempt")
    await trial.committed(other, await trial.one_ready(other), Done())


async def a_handler_for_all_types_takes_what_others_leave(trial: StoreTrial) -> None:
    one, every = await _worker(trial, "a"), await _worker(trial, "*")
    batch = [trial.candidate("a1", type="a"), trial.candidate("b1", type="b")]
    verdicts = await trial.claim(one, *batch)
    expect_answers(verdicts, Answer.RUN, Answer.PASSED_ON)
    expect(await trial.ready(one) == [], "the other one handles it")
    await trial.committed(one, trial.granted(verdicts[0]), Retry(0.0, "again"))
    expect((await trial.one_ready(one)).message.id == "a1", "its own retry")
    run = await trial.one_ready(every)
    expect((run.message.id, run.token.epoch) == ("b1", 2), "it handles all types")


async def what_nobody_handles_is_parked_once(trial: StoreTrial) -> None:
    one, same = await _worker(trial, "a"), await _worker(trial, "a")
    (verdict,) = await trial.claim(one, trial.candidate("c1", type="c"))
    expect(verdict.answer is Answer.PARKED, f"{verdict.answer}")
    expect(verdict.run is not None and verdict.run.message.id == "c1", "which message it was")
    expect_answers(await trial.claim(same, trial.candidate("c1", type="c")), Answer.KNOWN)
    expect(await _resume(trial, one, "a") == 0, "still nobody handles it")
    new = await _worker(trial, "c")
    expect(await _resume(trial, new, "c") == 1, "a worker with its handler came")
    expect(await trial.ready(one) == [] and await trial.ready(same) == [], "they have none")
    run = await trial.one_ready(new)
    expect((run.attempt, run.failures) == (1, 0), "waiting spends no attempt")
    await trial.committed(new, run, Done())
    kinds = _told(trial, "c1", PARKED, RESUMED, CLAIMED)
    expect(kinds == [PARKED, RESUMED, CLAIMED], f"{kinds}")


async def a_handler_that_comes_late_is_announced(trial: StoreTrial) -> None:
    one, other = await _worker(trial, "a"), await _worker(trial, "a")
    expect_answers(await trial.claim(one, trial.candidate("b1", type="b")), Answer.PARKED)
    offers = Offers(types={trial.sub.name: frozenset({"a", "b"})})
    one = await trial.store.announce(one, offers)
    expect(await _resume(trial, one, "b") == 1, "its handler is here")
    expect(await trial.ready(other) == [], "but not there")
    run = await trial.one_ready(one)
    expect((run.message.id, run.attempt) == ("b1", 1), f"{run}")
    expect_answers(await trial.claim(other, trial.candidate("b2", type="b")), Answer.PASSED_ON)


async def the_types_of_a_worker_that_is_gone(trial: StoreTrial) -> None:
    """It may be restarted, so they wait for a while. Then they are parked."""
    one, other = await _worker(trial, "a"), await _worker(trial, "b")
    for message_id in ("b1", "b2"):
        candidate = trial.candidate(message_id, type="b")
        expect_answers(await trial.claim(one, candidate), Answer.PASSED_ON)
    await trial.one_ready(other, limit=1)
    await trial.die(other)
    await trial.reap(one)
    expect(await trial.ready(one) == [], "a restart takes a moment")
    expect(_told(trial, "b2", PARKED) == [], "and parks nothing")
    trial.clock.advance(GRACE_S + 1)
    trial.store.beat(one)
    await _worker(trial, "a")
    expect(await trial.ready(one) == [], "nobody handles them any more")
    expect(_told(trial, "b2", PARKED) == [PARKED], "they are parked")
    again = await _worker(trial, "b")
    expect(await _resume(trial, again, "b") >= 1, "and go on with the next worker")
    expect("b2" in {run.message.id for run in await trial.ready(again)}, "it has the handler")


async def a_worker_that_is_gone_does_not_come_back_with_the_clock(trial: StoreTrial) -> None:
    """Set back by a day, the clock says that it ended tomorrow. Its messages must not wait."""
    one, other = await _worker(trial, "a"), await _worker(trial, "b")
    await trial.committed(other, await trial.run(other, "b1", type="b"), Done())
    await trial.store.leave(other)
    trial.clock.jump_wall(-86_400)
    await _worker(trial, "a")
    expect_answers(await trial.claim(one, trial.candidate("b2", type="b")), Answer.PARKED)


async def a_copy_that_comes_back_to_the_wrong_worker(trial: StoreTrial) -> None:
    """Its row is open, because the worker that ran it died while the broker had the body."""
    one, dead = await _worker(trial, "a"), await _worker(trial, "b")
    await trial.run(dead, "b1", type="b")
    await trial.die(dead)
    await trial.reap(one)
    trial.clock.jump_wall(-3600)  # it need not wait until the time of its worker's death
    other = await _worker(trial, "b", name="other")
    expect_answers(await trial.claim(one, trial.candidate("b1", type="b")), Answer.PASSED_ON)
    run = await trial.one_ready(other)
    expect((run.message.id, run.crashes, run.failures) == ("b1", 1, 0), f"{run}")
    expect(_told(trial, "b1", LOST, RECLAIMED) == [LOST, RECLAIMED], "taken over, by that one")
    await trial.committed(other, run, Done())


async def a_conversation_between_two_workers_keeps_its_order(trial: StoreTrial) -> None:
    one, other = await _worker(trial, "a"), await _worker(trial, "b")
    batch = [
        trial.candidate(f"m{n}", type=kind, ordering_key="talk") for n, kind in enumerate("abba")
    ]
    await trial.store.adopt_in_order(trial.lanes, batch, worker=one)
    ran: list[str] = []
    for kind in "abba":
        mine, idle = (one, other) if kind == "a" else (other, one)
        expect(await trial.ready(idle, sub=trial.lanes) == [], "not its turn, or not its type")
        run = await trial.one_ready(mine, sub=trial.lanes)
        ran.append(run.message.id)
        await trial.committed(mine, run, Done())
    expect(ran == ["m0", "m1", "m2", "m3"], f"{ran}")


async def suspects_run_where_their_handler_is(trial: StoreTrial) -> None:
    one, names = await _worker(trial, "a"), [trial.sub.name]
    run = await trial.run(other := await _worker(trial, "b"), "b1", type="b")
    await trial.committed(other, run, Retry(0.0, "died", crashed=True))
    run = await trial.one_ready(other)
    await trial.committed(other, run, Retry(0.0, "died", crashed=True))
    waiting = await trial.store.suspects(names, worker=other)
    expect((waiting.few, waiting.none) == (1, 0), f"it must run in a child: {waiting}")
    waiting = await trial.store.suspects(names, worker=one)
    expect((waiting.few, waiting.none) == (0, 0), f"but not there: {waiting}")
    expect(await trial.ready(one, company=Company.FEW) == [], "it has no handler for that")
    run = await trial.one_ready(other, company=Company.FEW)
    expect(run.message.id == "b1", f"{run}")


async def who_took_over_from_whom(trial: StoreTrial) -> None:
    """Of several survivors the one that claims is named, whoever found the death."""
    dead, finder, taker = [await trial.store.register(n) for n in ("dead", "finder", "taker")]
    await trial.run(dead, "open")
    await trial.store.adopt([held := await trial.run(dead, "held")], worker=dead)
    expect(held.message.id == "held", f"{held}")
    await trial.die(dead)
    await trial.reap(finder)
    expect([e for e in trial.events if e.type == RECLAIMED] == [], "nobody has claimed it yet")
    (verdict,) = await trial.claim(taker, trial.candidate("open"))
    runs: list[Run] = [trial.granted(verdict), await trial.one_ready(taker)]
    for run in runs:
        (event,) = [e for e in trial.events if (e.type, e.task_id) == (RECLAIMED, run.message.id)]
        names = (event.data["original_consumer"], event.data["new_consumer"])
        expect(names == ("dead", "taker"), f"{event.data}")
        await trial.committed(taker, run, Retry(0.0, "again"))
    for run in await trial.ready(finder):
        found = _told(trial, run.message.id, RECLAIMED)
        expect(found == [RECLAIMED], "a retry takes nothing over from anybody")
