"""Store checks: workers that live, leave and die, and what a run writes before its end."""

from __future__ import annotations

import asyncio

from ackbone.core.errors import EffectUnknown, LeaseLost, StoreUnavailable
from ackbone.core.events import FAILED, HEARTBEAT, RECLAIMED
from ackbone.core.outcome import Dead, Done, Park, ParkKind, Released, Retry
from ackbone.core.store import Company, EffectState, Reclaimed, Reply, Run, Worker
from ackbone.testing.harness import expect, fail
from tests.suites.store_harness import CRASH_BUDGET, LEASE_S, StoreTrial


async def numbers_are_given_out_once(trial: StoreTrial) -> None:
    seen = [(await trial.worker()).worker_id for _ in range(5)]
    worker = await trial.worker()
    await trial.store.leave(worker)
    seen += [worker.worker_id, (await trial.worker()).worker_id]
    expect(len(set(seen)) == len(seen), f"{seen}")


async def the_living_are_not_reaped(trial: StoreTrial) -> None:
    first, second = await trial.worker(), await trial.worker()
    run = await trial.run(first, "m")
    found = await trial.reap(second)
    expect(not found.workers and not found.tasks, f"{found}")
    for _ in range(5):
        trial.clock.advance(LEASE_S * 0.8)
        trial.store.beat(first)
        trial.store.beat(second)
        expect(not (await trial.reap(second)).workers, "it gave a sign of life")
    expect(trial.store.is_registered(first), "it is alive")
    await trial.committed(first, run, Done())


async def the_dead_are_reaped_once(trial: StoreTrial) -> None:
    dead, worker = await trial.worker(), await trial.worker()
    for n in range(3):
        await trial.run(dead, f"m{n}")
    await trial.die(dead)
    found = await trial.reap(worker)
    expect((list(found.workers), found.tasks) == ([dead.worker_id], 3), f"{found}")
    expect(not trial.store.is_registered(dead), "it was declared dead")
    expect(not (await trial.reap(worker)).workers, "twice")
    for n in range(3):
        (verdict,) = await trial.claim(worker, trial.candidate(f"m{n}"))
        run = trial.granted(verdict)
        expect((run.crashes, run.failures) == (1, 0), f"a crash spends no retry: {run}")


async def names_of_workers_that_ended(trial: StoreTrial) -> None:
    """A name ends with its last worker. A name that nobody had has not ended."""
    judge, dead = await trial.worker("judge"), await trial.worker("dead")
    restarted = await trial.worker("restarted")
    names = {"judge", "dead", "restarted", "nobody"}
    expect(await trial.store.ended(names) == frozenset(), "all are alive")
    await trial.die(dead)
    await trial.die(restarted)
    await trial.reap(judge)
    await trial.worker("restarted")
    ended = await trial.store.ended(names)
    expect(ended == {"dead"}, f"{sorted(ended)} have ended")


async def one_that_stands_still_is_dead_after_its_lease(trial: StoreTrial) -> None:
    still, worker = await trial.worker(), await trial.worker()
    run = await trial.run(still, "m")
    await trial.committed(still, run, Retry(0.0, "into the store"))
    await trial.one_ready(still)
    expect(await _reaped_within(trial, worker, 0.9) == [], "its lease is not over")
    expect(await _reaped_within(trial, worker, 0.9) == [still.worker_id], "its lease is over")
    again = await trial.one_ready(worker)
    expect((again.attempt, again.crashes, again.failures) == (3, 1, 1), f"{again}")


async def _reaped_within(trial: StoreTrial, worker: Worker, leases: float) -> list[int]:
    """Workers that are declared dead while this one beats and looks for so many leases."""
    found: list[int] = []
    for _ in range(3):
        trial.clock.advance(LEASE_S * leases / 3)
        trial.store.beat(worker)
        found += (await trial.reap(worker)).workers
    return found


async def the_clock_kills_nobody(trial: StoreTrial) -> None:
    """Somebody sets the wall clock: the living live, and the silent are dead after a lease."""
    living, still, worker = [await trial.worker() for _ in range(3)]
    await trial.reap(worker)
    for jump_s in (60, -60, 3600, -3600, 86_400, -86_400):
        trial.clock.jump_wall(jump_s)
        expect(not (await trial.reap(worker)).workers, f"a jump of {jump_s} s is no death")
        trial.store.beat(living)
    trial.clock.jump_wall(-86_400)
    dead: list[int] = []
    for _ in range(2):
        trial.store.beat(living)
        dead += await _reaped_within(trial, worker, 0.6)
    expect(dead == [still.worker_id], f"{dead} are dead, not the one that gave no sign of life")


async def a_crash_budget_ends_a_message(trial: StoreTrial) -> None:
    """Two crashes among others, one in a small group, then as many alone as nobody explains."""
    warden = await trial.worker("warden")
    await _crash_among_others(trial, warden, "m")
    await _crash_in_child(trial, warden, Company.FEW, code=-9)
    for crash in range(1, CRASH_BUDGET + 1):
        code = -15 if crash == 1 else -9  # both are sent from outside, as a rule
        found = await _crash_in_child(trial, warden, Company.NONE, code=code)
        expect(found.quarantined == int(crash == CRASH_BUDGET), f"crash {crash} alone: {found}")
    expect(trial.finals("m") == [FAILED], f"{trial.finals('m')}")
    waiting = await trial.store.suspects([trial.sub.name], worker=warden)
    expect(not waiting.none, f"it is over: {waiting}")


async def an_explained_crash_alone_ends_a_message(trial: StoreTrial) -> None:
    """Its parent saw an exit code, or a signal that nobody sends from outside."""
    for message_id, code in (("exit", 1), ("exit 0", 0), ("segfault", -11)):
        warden = await trial.worker("warden")
        await _crash_among_others(trial, warden, message_id)
        found = await _crash_in_child(trial, warden, Company.FEW, code=code)
        expect(not found.quarantined, f"in a group it may have been another one's: {found}")
        found = await _crash_in_child(trial, warden, Company.NONE, code=code)
        expect(found.quarantined == 1, f"exit code {code}: {found}")
        expect(trial.finals(message_id) == [FAILED], f"{trial.finals(message_id)}")


async def a_spent_crash_budget_lets_others_go(trial: StoreTrial) -> None:
    """The next one of its conversation runs, and the next one with its key."""
    warden = await trial.worker("warden")
    trial.sub = trial.lanes
    first = [
        trial.candidate("a1", ordering_key="a", idempotency_key="k"),
        trial.candidate("a2", ordering_key="a"),
    ]
    twin = [trial.candidate("b1", ordering_key="b", idempotency_key="k")]
    for batch in (first, twin):  # the twin comes when the first one has the key
        await trial.store.adopt_in_order(trial.lanes, batch, worker=warden)
        worker = await trial.worker()
        expect((await trial.one_ready(worker)).message.id == "a1", "it has the key")
        await trial.die(worker)
        await trial.reap(warden)
    await _crash_in_child(trial, warden, Company.FEW, code=1)
    found = await _crash_in_child(trial, warden, Company.NONE, code=1)
    expect(found.quarantined == 1, f"{found}")
    names = {run.message.id for run in await trial.ready(warden)}
    expect(names == {"a2", "b1"}, f"{names}")


async def a_child_is_judged_by_its_parent(trial: StoreTrial) -> None:
    """Others leave it; without an end that the parent saw, it is only told that it is silent."""
    warden, other = await trial.worker("warden"), await trial.worker("other")
    child = await trial.worker("child", parent=warden.as_parent)
    await trial.store.adopt([await trial.run(child, "m")], worker=child)
    await trial.die(child)
    found = await trial.reap(other)
    expect(not found.workers and not found.tasks, f"its parent lives: {found}")
    found = await trial.reap(warden)
    expect((list(found.workers), list(found.silent)) == ([], ["child"]), f"{found}")
    found = await trial.reap(warden, {"child": -9})
    expect((list(found.workers), found.tasks) == ([child.worker_id], 1), f"{found}")
    run = await trial.one_ready(other)
    expect(run.crashes == 1, f"{run}")
    line = str(run.history[-1]["error"])
    expect("SIGKILL" in line, line)


async def a_child_without_its_parent_counts_for_nobody(trial: StoreTrial) -> None:
    warden, other = await trial.worker("warden"), await trial.worker("other")
    child = await trial.worker("child", parent=warden.as_parent)
    await trial.store.adopt([await trial.run(child, "m")], worker=child)
    await trial.die(child)
    await trial.die(warden)
    for _ in range(2):  # the warden may be found first, or the child
        await trial.reap(other)
    run = await trial.one_ready(other)
    expect((run.crashes, run.attempt) == (0, 1), f"{run}")


async def a_death_that_a_sibling_outlived_counts(trial: StoreTrial) -> None:
    """The supervisor that started both is alive: it started the one that is."""
    dead = await trial.worker(parent="supervisor")
    await trial.store.adopt([await trial.run(dead, "m")], worker=dead)
    await trial.die(dead)
    successor = await trial.newcomer(parent="supervisor")
    await trial.reap(successor)
    run = await trial.one_ready(successor)
    expect((run.crashes, run.attempt) == (1, 2), f"{run}")


async def a_death_that_another_supervisors_worker_outlived_counts(trial: StoreTrial) -> None:
    """That one is the younger of the two, but it was there before the other one died."""
    dead = await trial.worker(parent="supervisor")
    await trial.store.adopt([await trial.run(dead, "m")], worker=dead)
    younger = await trial.newcomer(parent="another supervisor")
    trial.clock.advance(2 * LEASE_S)
    for worker in (dead, younger):
        trial.store.beat(worker)
    await trial.reap(younger)
    await trial.die(dead)
    await trial.reap(younger)
    run = await trial.one_ready(younger)
    expect((run.crashes, run.attempt) == (1, 2), f"{run}")


async def a_death_that_nothing_outlived_counts_for_nobody(trial: StoreTrial) -> None:
    """All processes of the machine died; those that reap were started after that."""
    dead = [await trial.worker(parent="supervisor") for _ in range(2)]
    for n, worker in enumerate(dead):
        await trial.store.adopt([await trial.run(worker, f"m{n}")], worker=worker)
    for worker in dead:
        await trial.die(worker)
    newcomer = await trial.newcomer(parent="another supervisor")
    found = await trial.reap(newcomer)
    expect(found.tasks == 2, f"{found}")
    for run in await trial.ready(newcomer):
        expect((run.crashes, run.attempt, run.failures) == (0, 1, 0), f"{run}")
        told = [e.type for e in trial.events if e.task_id == run.message.id]
        expect(RECLAIMED in told, f"somebody took it over: {told}")


async def an_announced_stop_counts_for_nobody(trial: StoreTrial) -> None:
    """It claims nothing more, ends what it can, and a kill is no crash of its messages."""
    leaving, other = await trial.worker(), await trial.worker()
    ends, cut = await trial.run(leaving, "ends"), await trial.run(leaving, "cut")
    await trial.store.adopt([ends, cut], worker=leaving)
    await trial.store.leave(leaving, running=True)
    expect(trial.store.is_registered(leaving), "its runs go on")
    try:
        await trial.claim(leaving, trial.candidate("new"))
    except StoreUnavailable:
        pass
    else:
        fail("a worker that is leaving claims nothing")
    await trial.committed(leaving, ends, Done())
    await trial.die(leaving)
    await trial.reap(other)
    run = await trial.one_ready(other)
    expect((run.message.id, run.crashes, run.attempt) == ("cut", 0, 1), f"{run}")


async def _crash_among_others(trial: StoreTrial, reaper: Worker, message_id: str) -> None:
    """Two ordinary workers die under it."""
    for crash in range(2):
        worker = await trial.worker()
        if crash == 0:
            await trial.store.adopt([await trial.run(worker, message_id)], worker=worker)
        else:
            await trial.one_ready(worker)
        await trial.die(worker)
        await trial.reap(reaper)


async def _crash_in_child(
    trial: StoreTrial, warden: Worker, company: Company, *, code: int
) -> Reclaimed:
    """A child takes the one message that waits in this company, and ends with this exit code."""
    waiting = await trial.store.suspects([trial.sub.name], worker=warden)
    few = company is Company.FEW
    expect((waiting.few, waiting.none) == (int(few), int(not few)), f"{company}: {waiting}")
    child = await trial.worker("child", parent=warden.as_parent)
    expect(not await trial.ready(child), "it is not for an ordinary worker")
    other = Company.NONE if few else Company.FEW
    expect(not await trial.ready(child, company=other), f"nor for company {other}")
    await trial.one_ready(child, company=company)
    await trial.die(child)
    return await trial.reap(warden, {"child": code})


async def a_crash_stays_in_the_history(trial: StoreTrial) -> None:
    """Of what the broker holds, too: whoever reads a dead letter wants to know all of it."""
    late, worker = await trial.worker(), await trial.worker()
    await trial.run(late, "m")
    await trial.die(late)
    await trial.reap(worker)
    (verdict,) = await trial.claim(worker, trial.candidate("m"))
    await trial.committed(worker, trial.granted(verdict), Retry(0.0, "failed"))
    again = await trial.one_ready(worker)
    expect([line["attempt"] for line in again.history] == [1, 2], f"{again.history}")


async def leaving_hands_back(trial: StoreTrial) -> None:
    """What a worker still holds when it signs off returns, and spends nothing."""
    first, second = await trial.worker(), await trial.worker()
    held = await trial.run(first, "held")
    await trial.committed(first, held, Retry(0.0, "into the store"))
    await trial.one_ready(first)
    await trial.run(first, "broker")
    await trial.store.leave(first)
    expect(not (await trial.reap(second)).workers, "who left is not dead")
    again = await trial.one_ready(second)
    expect((again.crashes, again.failures) == (0, 1), f"{again}")
    expect([line["error"] for line in again.history] == ["into the store"], f"{again.history}")
    (verdict,) = await trial.claim(second, trial.candidate("broker"))
    run = trial.granted(verdict)
    expect((run.attempt, run.crashes) == (1, 0), f"{run}")


async def bells_ring_for_what_is_ready(trial: StoreTrial) -> None:
    """Whoever waits for work need not look for it by himself."""
    worker, other = await trial.worker(), await trial.worker()
    bell = trial.store.subscribe()

    async def rung(why: str) -> Run:
        try:
            async with asyncio.timeout(10):
                await bell.wait()
        except TimeoutError:
            fail(f"no bell: {why}")
        found = await trial.one_ready(worker)
        bell.clear()
        return found

    run = await trial.run(worker, "m")
    bell.clear()
    await trial.committed(worker, run, Retry(0.0, "again"))
    run = await rung("it failed, and is due at once")
    await trial.committed(worker, run, Released())
    run = await rung("it was released")
    await trial.committed(worker, run, Done())
    for name in ("crashed", "left"):
        await trial.store.adopt([await trial.run(other, name)], worker=other)
        bell.clear()
        if name == "crashed":
            await trial.die(other)
            await trial.reap(worker)
        else:
            await trial.store.leave(other)
        run = await rung(f"its worker {name}")
        await trial.committed(worker, run, Done())
        other = await trial.worker()
    run = await trial.run(worker, "holder", idempotency_key="k")
    await trial.claim(worker, trial.candidate("next", idempotency_key="k"))
    bell.clear()
    await trial.committed(worker, run, Dead(reason="r"))
    await trial.committed(worker, await rung("its key is free"), Done())
    trial.store.unsubscribe(bell)


async def a_role_has_one_holder(trial: StoreTrial) -> None:
    first, second, third = [await trial.worker() for _ in range(3)]
    hold = trial.store.hold_role
    expect(await hold("r", worker=first), "it is free")
    expect(await hold("r", worker=first), "it is its own")
    expect(not await hold("r", worker=second), "it is taken")
    expect(await hold("other", worker=second), "another role")
    await trial.store.leave(first)
    expect(await hold("r", worker=second), "its holder left")
    await trial.die(second)
    await trial.reap(third)
    expect(await hold("r", worker=third), "its holder died")


# -- writes of a run ------------------------------------------------------------------------------


async def effects(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "m")
    store = trial.store
    expect(await store.effect_begin(run, "pay") == (EffectState.NEW, None), "nobody began it")
    state, _ = await store.effect_begin(run, "pay")
    expect(state is EffectState.UNKNOWN, f"begun, not recorded: {state}")
    await store.effect_done(run, "pay", b'{"n":1}')
    expect(await store.effect_begin(run, "pay") == (EffectState.DONE, b'{"n":1}'), "recorded")
    await store.effect_clear(run, "pay")
    expect((await store.effect_begin(run, "pay"))[0] is EffectState.DONE, "what is done stays")
    await store.effect_begin(run, "mail")
    await store.effect_clear(run, "mail")
    expect((await store.effect_begin(run, "mail"))[0] is EffectState.NEW, "it was cleared")
    other = await trial.run(worker, "x")
    expect((await store.effect_begin(other, "pay"))[0] is EffectState.NEW, "another message's")


async def a_repeated_intent_is_its_own(trial: StoreTrial) -> None:
    """Its first answer was lost. Another call of the same run finds the intent of the first."""
    worker = await trial.worker()
    run = await trial.run(worker, "m")
    await trial.store.effect_begin(run, "pay")
    expect((await trial.store.effect_begin(run, "pay", again=True))[0] is EffectState.NEW, "own")
    await trial.store.effect_raised(run, "pay", "TimeoutError: late")
    expect(
        await trial.store.effect_begin(run, "pay", again=True)
        == (EffectState.UNKNOWN, b"TimeoutError: late"),
        "it was called meanwhile, and raised",
    )


async def a_late_result_resumes_its_message(trial: StoreTrial) -> None:
    """A worker that stood still records what it did after the message was parked for that."""
    still, worker, name = await trial.worker(), await trial.worker(), "pay O'Neill"
    first = await trial.run(still, "m")
    await trial.store.adopt([first], worker=still)
    await trial.store.effect_begin(first, name)
    await trial.die(still)
    await trial.reap(worker)
    second = await trial.one_ready(worker)
    state, _ = await trial.store.effect_begin(second, name)
    expect(state is EffectState.UNKNOWN, f"{state}")
    reason = str(EffectUnknown(name))
    await trial.committed(worker, second, Park(kind=ParkKind.EFFECT_UNKNOWN, reason=reason))
    await trial.store.resolve(worker=worker)
    expect(await trial.ready(worker) == [], "nobody knows yet")
    await trial.store.effect_done(first, "mail", b"1")
    await trial.store.resolve(worker=worker)
    expect(await trial.ready(worker) == [], "that was another effect")
    await trial.store.effect_done(first, name, b"7")
    await trial.store.resolve(worker=worker)
    third = await trial.one_ready(worker)
    found = await trial.store.effect_begin(third, name)
    expect(found == (EffectState.DONE, b"7"), f"{found}")
    await trial.committed(worker, third, Done())


async def effects_outlive_their_attempt(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "m")
    await trial.store.effect_begin(run, "pay")
    await trial.store.effect_done(run, "pay", b"1")
    await trial.store.effect_begin(run, "mail")
    await trial.committed(worker, run, Retry(0.0, "again"))
    again = await trial.one_ready(worker)
    expect(await trial.store.effect_begin(again, "pay") == (EffectState.DONE, b"1"), "pay")
    expect((await trial.store.effect_begin(again, "mail"))[0] is EffectState.UNKNOWN, "mail")


async def writes_of_a_run_that_is_over_are_refused(trial: StoreTrial) -> None:
    dead, worker = await trial.worker(), await trial.worker()
    lost = await trial.run(dead, "lost")
    await trial.die(dead)
    await trial.reap(worker)
    over = await trial.run(worker, "over")
    await trial.committed(worker, over, Done())
    reply = Reply(channel="c", recipient="r", content="x", now=True)
    for run in (lost, over):
        await _refused(trial, run, reply)


async def _refused(trial: StoreTrial, run: Run, reply: Reply) -> None:
    store = trial.store
    for name, call in (
        ("effect_begin", lambda: store.effect_begin(run, "e")),
        ("effect_clear", lambda: store.effect_clear(run, "e")),
        ("heartbeat", lambda: store.heartbeat(run, {})),
        ("reply_now", lambda: store.reply_now(run, reply, 1)),
    ):
        try:
            await call()
        except LeaseLost:
            continue
        fail(f"{name} of a run that is not its worker's any more")


async def heartbeats_are_events(trial: StoreTrial) -> None:
    worker = await trial.worker()
    run = await trial.run(worker, "m")
    await trial.store.heartbeat(run, {"step": 2})
    beats = [event for event in trial.events if event.type == HEARTBEAT]
    expect([event.data.get("step") for event in beats] == [2], f"{beats}")
